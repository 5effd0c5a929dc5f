"""`ray up` as a user runs it: a laptop, a head and two workers, each a host of its own with a real sshd.

The hosts are namespaces of this machine (`tests/netns.py`). Of deploy/ray/onprem.yaml only the addresses, the key, what
is served, and the installation (which needs a package index) are others than a user's.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.netns import Host, hosts_of_one_network, why_not
from tests.servers import assert_gone

pytestmark = pytest.mark.deploy

REPOSITORY = Path(__file__).resolve().parents[2]
HOME = pwd.getpwuid(os.getuid()).pw_dir  # on every host another folder; ssh heeds no variable
SSHD = "/usr/sbin/sshd"
PATIENCE = 240  # seconds; only a failing test waits that long
SERVED = {"model": "demo", "device": "cpu", "tensor-parallel-size": 2, "replicas": 2, "host": "0.0.0.0", "port": 8000}
SERVE_SCRIPT = "sh ~/novainfer-source/ray/serve.sh"
NUM_TOKENS = 600
CHAT = """
import json, sys, httpx
body = {"prompt": "The sea was calm. " * 4, "stream": True, "max_tokens": int(sys.argv[2]), "ignore_eos": True,
        "temperature": 1.0, "seed": 7, "return_token_ids": True}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, trust_env=False, timeout=120) as reply:
    for line in reply.iter_lines():
        if line:
            print(line, flush=True)
"""


@dataclass(frozen=True)
class Cluster:
    """The hosts, and what a user has on the laptop."""

    laptop: Host
    head: Host
    workers: tuple[Host, ...]
    file: str

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{self.head.address}:{SERVED['port']}"

    def ray(self, *arguments: str) -> str:
        """Run `ray ...` on the laptop, in the repository; what it says."""
        done = subprocess.run(
            [*self.laptop.prefix, "env", "-C", REPOSITORY, sys.executable, "-m", "ray.scripts.scripts", *arguments],
            capture_output=True,
            text=True,
            env=environ(),
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said

    def on_head(self, command: str) -> str:
        """`ray exec`."""
        return self.ray("exec", "--no-config-cache", self.file, command)

    def stream(self) -> subprocess.Popen[str]:
        """A completion of always the same tokens, asked for from the laptop, line by line."""
        command = (sys.executable, "-c", CHAT, self.url, str(NUM_TOKENS))
        return subprocess.Popen([*self.laptop.prefix, *command], stdout=subprocess.PIPE, text=True, env=environ())


def environ() -> dict[str, str]:
    """The laptop's. See deploy/ray/onprem.yaml for the variable of Ray's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": HOME, "RAY_UP_enable_autoscaler_v2": "0", "PYTHONPATH": str(REPOSITORY)}


def missing() -> str | None:
    absent = [tool for tool in ("ssh", "ssh-keygen", "rsync") if shutil.which(tool) is None]
    if not Path(SSHD).exists():
        absent.append("sshd")
    return f"{', '.join(absent)} not installed" if absent else why_not()


def new_key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


def start_sshd(host: Host, user_key: Path, log: Path) -> subprocess.Popen[bytes]:
    """Let a key in. The daemon ends with its host."""
    host.run("mount", "-t", "tmpfs", "tmpfs", "/run")
    host.run("mkdir", "/run/sshd")
    (host.tmp / "ssh").mkdir()
    new_key(host.tmp / "ssh" / "host")
    shutil.copy(user_key.with_suffix(".pub"), host.tmp / "ssh" / "authorized_keys")
    options = {
        "HostKey": "/tmp/ssh/host",
        "AuthorizedKeysFile": "/tmp/ssh/authorized_keys",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    (host.tmp / "ssh" / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    with open(log, "wb") as file:
        return subprocess.Popen([*host.prefix, SSHD, "-D", "-e", "-f", "/tmp/ssh/config"], stdout=file, stderr=file)


def cluster_file(head: Host, workers: Sequence[Host]) -> dict[str, Any]:
    """deploy/ray/onprem.yaml with these hosts, and without a download."""
    config: dict[str, Any] = yaml.safe_load((REPOSITORY / "deploy" / "ray" / "onprem.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": f"{HOME}/key"}
    config["file_mounts"]["~/novainfer.yaml"] = f"{HOME}/served.yaml"
    assert "install.sh" in config["setup_commands"][0]
    config["setup_commands"][0] = f"test -e ~/novainfer || ln -s {sys.prefix} ~/novainfer"
    return config


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """What `ray up` makes of three hosts: the model is served."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ray-up")
    with hosts_of_one_network(folder, 4) as (laptop, head, *workers), ExitStack() as stack:
        homes = [host.take_home(Path(HOME)) for host in (laptop, head, *workers)]
        for home in homes:
            (home / ".bashrc").touch()
        mine = homes[0]
        new_key(mine / "key")
        for host in (head, *workers):
            stack.enter_context(start_sshd(host, mine / "key", folder / f"sshd-{host.address}"))
            stack.callback(host.close)
        (mine / "served.yaml").write_text(yaml.safe_dump(SERVED))
        (mine / "cluster.yaml").write_text(yaml.safe_dump(cluster_file(head, workers)))
        made = Cluster(laptop, head, tuple(workers), f"{HOME}/cluster.yaml")
        made.ray("get-auth-token", "--generate")
        made.ray("up", "--yes", "--no-config-cache", made.file)
        assert "NovaInfer is ready on" in made.on_head(f"{SERVE_SCRIPT} wait")
        yield made


def ranks(host: Host) -> dict[str, psutil.Process]:
    """The rank processes on a host, by title."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ()).strip("\0 ")
        if title.startswith("novainfer: worker") and host.holds(process.pid):
            found[title] = process
    return found


def tokens(lines: list[str]) -> list[int]:
    """Of a stream's lines; it must have ended well."""
    assert lines[-1] == "data: [DONE]", lines[-3:]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


def read(stream: subprocess.Popen[str], number: int | None = None) -> list[str]:
    """So many lines, or all that are left."""
    assert stream.stdout is not None
    if number is not None:
        return [stream.stdout.readline().strip() for _ in range(number)]
    return [line.strip() for line in stream.communicate(timeout=PATIENCE)[0].splitlines()]


def test_given_a_cluster_of_ray_up_when_a_rank_or_its_whole_host_dies_in_a_stream_then_the_same_tokens_come(
    cluster: Cluster,
) -> None:
    assert not ranks(cluster.head)
    for worker in cluster.workers:
        assert len(ranks(worker)) == 2  # of one replica each
    whole = tokens(read(cluster.stream()))
    assert len(whole) == NUM_TOKENS

    stream = cluster.stream()
    begun = read(stream, 20)
    victims = [process for worker in cluster.workers for title, process in ranks(worker).items() if title[-1] == "1"]
    for process in victims:  # one of each replica: wherever the stream is, it is hit
        process.kill()
    assert tokens(begun + read(stream)) == whole
    assert_gone(victims)

    cluster.on_head(f"{SERVE_SCRIPT} wait")
    stream = cluster.stream()
    begun = read(stream, 20)
    lost, *rest = cluster.workers
    lost.close()
    assert tokens(begun + read(stream)) == whole
    assert all(ranks(worker) for worker in rest)
    assert tokens(read(cluster.stream())) == whole


def test_given_a_cluster_of_ray_up_when_the_server_is_stopped_and_the_cluster_taken_down_then_nothing_runs(
    cluster: Cluster,
) -> None:
    cluster.on_head(f"{SERVE_SCRIPT} stop")
    for host in (cluster.head, *cluster.workers[1:]):
        assert not ranks(host)
    assert not (cluster.head.tmp / "home" / ".novainfer" / "run").exists()
    cluster.ray("down", "--yes", cluster.file)
    servers = {"raylet", "gcs_server"}
    left = [p for p in psutil.process_iter(["name"]) if p.info["name"] in servers and cluster.head.holds(p.pid)]
    assert not left
