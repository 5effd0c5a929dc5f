"""A real Prometheus for tests: its own folder and port, ended with its context."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "novainfer"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = sorted((CHART / "rules").glob("*.yaml"))
PATIENCE = 120  # seconds; only a failing test waits that long
NAME = re.compile(r"\bnovainfer_[a-z0-9_]+")


class Prometheus:
    """One that runs."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    def get(self, path: str, **params: str | float) -> Any:
        """The data of an answer of its API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, trust_env=False, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait_for(self, expressions: Sequence[str]) -> None:
        """Until each has data at the same time or another."""
        missing = list(expressions)
        deadline = time.monotonic() + PATIENCE
        while missing:
            missing = [expression for expression in missing if not self.query(expression)]
            assert time.monotonic() < deadline, missing
            assert self._process.poll() is None, self._log.read_text()


@contextmanager
def prometheus(folder: Path, target: str, *, key: str = "", rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Scrapes `target` (host:port) each second. key: of the server's API."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job: dict[str, Any] = {"job_name": "novainfer", "static_configs": [{"targets": [target]}]}
    if key:
        job["authorization"] = {"credentials": key}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(log, "wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + PATIENCE
            while not _answers(url):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
            yield Prometheus(url, process, log)
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        time.sleep(0.05)  # nothing says when it listens
        return False


def panel_queries() -> dict[str, str]:
    """Every query of every panel with the dashboards' variables set to everything, by where it is."""
    found = {}
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "10s")
                expression = expression.replace("$model", ".*").replace("$engine", ".*")
                found[f"{path.stem}: {panel['title']}: {target['refId']}"] = expression
    return found


def rule_queries() -> dict[str, str]:
    """The expression of every rule, by its name."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule.get("record") or rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
