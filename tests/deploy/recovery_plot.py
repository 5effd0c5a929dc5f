"""A kill as the recovery dashboard shows it: `python -m tests.deploy.recovery_plot docs/images/recovery.svg`.

Two replicas under load; one is killed with all its processes, later a rank of the other, then its scheduler, while a
real Prometheus scrapes each second. The picture is the dashboard's own queries over that time. Every stream must be
exact, and the figures must add up afterwards. Needs Prometheus and matplotlib (`make test-deploy`, the extra `plots`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from novainfer.transport.addresses import RunDir
from tests.chaos.kill_loop import Crowd, Kill, make_requests, report
from tests.chaos.replica_loop import kill_replica, wait_until_all_serve
from tests.chaos.streams import read_all
from tests.conservation import at_rest
from tests.deploy.prometheus import CHART, RULES, Prometheus, prometheus
from tests.servers import RunningServer

CALM = 20.0  # seconds before, between and after the kills
NUM_STREAMS = 8
WINDOW = "5s"  # of rates: Grafana would take four scrapes


def kill_and_watch(server: RunningServer, run_dir: RunDir, crowd: Crowd) -> list[Kill]:
    """The blows, each followed by some calm."""
    kills = []
    for number, title in enumerate(("replica 0", "worker 1.0", "scheduler 1")):
        time.sleep(CALM)
        old = server.processes()
        kills.append(Kill(number, "kill", title, "any", time.monotonic()))
        if title == "replica 0":
            kill_replica(server, 0, random.Random(0))
            wait_until_all_serve(server, run_dir, old[title], 0)
        else:
            old[title].kill()
    time.sleep(CALM)
    return kills


def series(scraper: Prometheus, began: float, ended: float) -> dict[str, list[tuple[str, list[float], list[float]]]]:
    """Of each panel of the dashboard: (legend, seconds since the beginning, values)."""
    found: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for panel in json.loads((CHART / "dashboards" / "recovery.json").read_text())["panels"]:
        lines = found[panel["title"]] = []
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", WINDOW).replace("$model", ".*").replace("$engine", ".*")
            answer = scraper.get("query_range", query=query, start=began, end=ended, step=1)
            for one in answer["result"]:
                legend = target["legendFormat"]
                for label, value in one["metric"].items():
                    legend = legend.replace("{{" + label + "}}", value)
                times = [float(at) - began for at, _ in one["values"]]
                lines.append((legend, times, [float(value) for _, value in one["values"]]))
    return found


def draw(panels: dict[str, Any], marks: list[tuple[float, str]], file: Path) -> None:
    """All panels, with a line at each kill."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "novainfer", "font.size": 8})
    columns = 3
    figure, grid = pyplot.subplots(-(-len(panels) // columns), columns, figsize=(14, 9), layout="constrained")
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for legend, times, values in lines:
            axes.plot(times, values, label=legend, linewidth=1)
        for at, what in marks:
            axes.axvline(at, color="red", linewidth=0.8, linestyle=":")
            axes.annotate(what, (at, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=6)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        if lines:
            axes.legend(fontsize=6, loc="upper left")
    figure.supxlabel("seconds")
    figure.savefig(file, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    """Draw it; 0 if no stream was disturbed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where the picture goes")
    args = parser.parse_args(argv)
    requests = make_requests(random.Random(0), 24)
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        path = Path(folder)
        undisturbed = RunningServer("--log-level", "warning", log=path / "undisturbed.log")
        oracle = read_all(undisturbed, requests)
        undisturbed.stop()
        server = RunningServer("--replicas", "2", "--run-dir", str(path / "run"), log=path / "server.log")
        with prometheus(path, server.base_url.removeprefix("http://"), rules=RULES) as scraper:
            scraper.wait_for(["novainfer_engine_ready"])
            offset = time.time() - time.monotonic()
            began = time.time()
            crowd = Crowd(server, requests, oracle, NUM_STREAMS)
            kills = kill_and_watch(server, RunDir(path / "run"), crowd)
            crowd.stop()
            marks = [(kill.at + offset - began, f" {kill.title} killed") for kill in kills]
            draw(series(scraper, began, time.time()), marks, args.file)
        for figures in at_rest(server):
            figures.check_engines()
            figures.check_gateways()
            assert figures.of("requests_ended_total", "failed") == 0
        server.stop()
    print(f"conserved: {figures['requests_begun_total']:.0f} requests begun and ended")
    return 0 if report(kills, crowd.lives, None) else 1


if __name__ == "__main__":
    sys.exit(main())
