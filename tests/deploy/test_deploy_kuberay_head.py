"""The command that the chart gives a RayCluster's head, run on two hosts made of namespaces, as KubeRay would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.deploy.charts import render
from tests.netns import Host, hosts_of_one_network, why_not

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed (make test-deploy)")

pytestmark = pytest.mark.deploy

PATIENCE = 180  # seconds; only a failing test waits that long
PORT = 6379
VALUES = {"mode": "kuberay", "models": [{"name": "demo", "model": "demo", "device": "cpu", "tensorParallelSize": 2}]}
START = f"ray start --object-store-memory={80 * 1024 * 1024} --block"
CHAT = """
import json, sys, httpx
body = {"messages": [{"role": "user", "content": "What is 23 plus 45?"}], "max_tokens": 12}
print(httpx.post(sys.argv[1] + "/v1/chat/completions", json=body, trust_env=False, timeout=60).text)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, ...]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts_of_one_network(tmp_path) as both:
        yield both


def environ(start: str) -> dict[str, str]:
    """Of a pod: the operator puts what it would have run into a variable, and the token into another."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, **token, "PATH": path, "KUBERAY_GEN_RAY_START_CMD": start}


def head_command() -> list[str]:
    """Command and arguments of the head's container."""
    (cluster,) = render(VALUES).of("RayCluster")
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def wait_for(output: IO[str], words: str) -> None:
    """Read lines until one has these words."""
    for line in output:
        if words in line:
            return
    raise AssertionError(f"it ended before it said {words!r}")


def test_given_a_ray_cluster_when_its_head_runs_the_charts_command_then_the_other_hosts_ranks_answer_and_it_drains(
    hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    head, worker = hosts
    begin = f"{START} --head --port={PORT} --num-cpus=0 --disable-usage-stats --node-ip-address={head.address}"
    join = f"{START} --address={head.address}:{PORT} --num-cpus=2 --node-ip-address={worker.address}"
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*head.prefix, *head_command()], stdout=subprocess.PIPE, stderr=log, text=True, env=environ(begin)
        )
        ranks = subprocess.Popen(
            [*worker.prefix, "sh", "-c", f"until ray health-check --address {head.address}:{PORT}; do :; done; {join}"],
            stdout=log,
            stderr=log,
            env=environ(join),
        )
    try:
        assert server.stdout is not None
        wait_for(server.stdout, "NovaInfer is ready")
        answer = json.loads(worker.run(sys.executable, "-c", CHAT, f"http://{head.address}:8000"))
        assert answer["choices"][0]["message"]["content"]
        assert f"the ranks are on {worker.address}" in (tmp_path / "log").read_text()
        (inside,) = [int(pid) for pid in children_of(server.pid)]
        os.kill(inside, signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        head.close()
        worker.close()
        server.communicate()
        ranks.wait(PATIENCE)


def children_of(pid: int) -> list[str]:
    """The container's first process, below `nsenter`."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
