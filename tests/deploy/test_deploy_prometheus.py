"""Dashboards and rules against a real server that a real Prometheus scrapes, and promtool's own checks."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.prometheus import (
    DASHBOARDS,
    NAME,
    REPOSITORY,
    RULES,
    Prometheus,
    panel_queries,
    prometheus,
    rule_queries,
)
from tests.servers import RunningServer

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not installed",
    ),
]
KEY = "key-red"
ENDINGS = re.compile(r"_(total|bucket|sum|count)$")


def promtool(*arguments: str, text: str | None = None) -> None:
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Load:
    """Clients that ask again and again until they are told to stop; what went wrong."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        key = ("key-red", "key-blue")[number % 2]
        body = {"prompt": "The sea was calm. " * 6, "max_tokens": 100, "ignore_eos": True, "seed": number}
        with self._server.http(**{"x-api-key": key}) as http:
            while not self._is_over.is_set():
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    self.faults.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.faults.append(answer.text)
                http.post("/v1/completions", json={**body, "max_tokens": -1})  # refused


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text("red:key-red\nblue:key-blue\n")
    flags = ("--replicas", "2", "--num-gateways", "2", "--api-key-file", str(folder / "keys"))
    with RunningServer(*flags, "--speculation", "prompt-lookup", log=folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def scraper(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, server.base_url.removeprefix("http://"), key=KEY, rules=RULES) as running:
        yield running


def kill_engines_until_requests_move(server: RunningServer, scraper: Prometheus) -> None:
    """The one with the load: prompts with the same beginning go to the same engine, and may leave the other idle. It
    may have none at just that moment, and then nothing moves.
    """
    busiest = "topk(1, sum by (engine) (rate(novainfer_gateway_tokens_received_total[10s])) > 0)"
    while not scraper.query("sum(novainfer_requests_moved_total) > 0"):
        scraper.wait_for([busiest])
        for found in scraper.query(busiest):
            replica = server.processes().get(f"replica {found['metric']['engine']}")
            if replica is not None:  # else it is being replaced
                replica.kill()  # all below it die with it
        scraper.wait_for([f"max(timestamp(novainfer_requests_moved_total)) > {time.time() + 1.0}"])


def exposition(server: RunningServer) -> str:
    with server.http(**{"x-api-key": KEY}) as http:
        return http.get("/metrics").text


def test_given_load_and_a_dead_engine_when_prometheus_scrapes_then_every_panel_and_rule_has_data(
    server: RunningServer, scraper: Prometheus
) -> None:
    panels, rules = panel_queries(), rule_queries()
    assert len(panels) > 40
    alerts = {name for name in rules if ":" not in name}
    with Load(server) as load:
        scraper.wait_for(["sum(rate(novainfer_generation_tokens_total[10s])) > 0"])
        kill_engines_until_requests_move(server, scraper)
        scraper.wait_for([*panels.values(), *(rules[name] for name in rules if name not in alerts)])
        scraper.wait_for([name for name in rules if name not in alerts])
        health = {rule["name"]: rule["health"] for group in scraper.get("rules")["groups"] for rule in group["rules"]}
    assert set(health) == set(rules)
    assert set(health.values()) == {"ok"}
    assert not load.faults
    assert not scraper.query('ALERTS{alertname="NovaInferRequestsFail"}')
    lost = scraper.query('sum(novainfer_requests_ended_total{outcome="failed"})')
    assert float(lost[0]["value"][1]) == 0


def test_every_name_that_is_used_or_documented_when_looked_up_then_the_server_exports_it(server: RunningServer) -> None:
    text = exposition(server)
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    families = {ENDINGS.sub("", name) for name in exported}
    used = {
        ENDINGS.sub("", name)
        for query in [*panel_queries().values(), *rule_queries().values()]
        for name in NAME.findall(query)
    }
    assert used <= families
    documented = {ENDINGS.sub("", name) for name in NAME.findall((REPOSITORY / "docs" / "metrics.md").read_text())}
    assert documented == families


def test_what_the_server_exports_when_promtool_reads_it_then_it_has_no_complaint(server: RunningServer) -> None:
    promtool("check", "metrics", text=exposition(server))


def test_the_rules_when_promtool_checks_and_tests_them_then_they_do_what_they_say(tmp_path: Path) -> None:
    promtool("check", "rules", *map(str, RULES))
    written = (REPOSITORY / "tests" / "deploy" / "rules" / "alerts_test.yaml").read_text()
    test = tmp_path / "test.yaml"
    test.write_text(written.replace("RULES/", f"{RULES[0].parent}/"))
    promtool("test", "rules", str(test))
    for name in rule_queries():
        assert name in written or ":" in name


def test_the_alerts_when_somebody_is_woken_then_the_runbook_has_a_section_for_each() -> None:
    headings = re.findall(r"^#+ (.+)$", (REPOSITORY / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert {name.lower() for name in rule_queries() if ":" not in name} <= anchors


def test_the_dashboards_when_written_again_then_they_are_the_same() -> None:
    rendered = runpy.run_path(str(REPOSITORY / "deploy" / "dashboards.py"))["rendered"]()
    assert {path: path.read_text() for path in DASHBOARDS} == rendered
