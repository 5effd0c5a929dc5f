"""What the figures of /metrics have to add up to: docs/metrics.md has the laws."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.servers import RunningServer

PATIENCE = 60  # seconds until what has ended must show in every gateway's figures
LIVE = ("num_requests_running", "num_requests_waiting", "gateway_live_requests")


class Figures:
    """One scrape: sums of samples by name, and by name and one label's value."""

    def __init__(self, text: str) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.by_label: dict[tuple[str, str], float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.sums[sample.name] += sample.value
                for value in sample.labels.values():
                    self.by_label[sample.name, value] += sample.value

    def __getitem__(self, name: str) -> float:
        return self.sums[f"novainfer_{name}"]

    def of(self, name: str, value: str) -> float:
        """With this value of a label."""
        return self.by_label[f"novainfer_{name}", value]

    def check_engines(self) -> None:
        """The law of the schedulers, at every moment: a choice that was accepted has ended, runs or waits."""
        live = self["num_requests_running"] + self["num_requests_waiting"]
        assert self["choices_accepted_total"] == self["choices_finished_total"] + live

    def check_gateways(self) -> None:
        """The law of the gateways, at rest: what was begun has ended."""
        assert self["requests_begun_total"] == self["requests_ended_total"]


def scrape(server: RunningServer, headers: Mapping[str, str]) -> Figures:
    """On a connection of its own: any gateway may answer."""
    with server.http(**headers) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200
    return Figures(answer.text)


def at_rest(server: RunningServer, num_ended: int | None = None, **headers: str) -> list[Figures]:
    """Scrapes, as many as likely reach every gateway, once all say that nothing is live and so many have ended.

    None: once they say the same.
    """
    deadline = time.monotonic() + PATIENCE
    found: list[Figures] = []
    while len(found) < 8:
        now = scrape(server, headers)
        wanted = num_ended if num_ended is not None else (found[-1] if found else now)["requests_ended_total"]
        is_still = now["requests_ended_total"] == wanted and not any(now[name] for name in LIVE)
        found = [*found, now] if is_still else []
        assert time.monotonic() < deadline, dict(now.sums)
    return found
