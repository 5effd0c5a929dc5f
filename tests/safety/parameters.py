"""Sends the table of parameters to a server of its own: `python -m tests.safety.parameters [--optimised]`.

Prints how many cases came out otherwise than the table says, how many processes died, and whether all that the
requests held was given back. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from novainfer.transport.addresses import RunDir
from tests.safety.doors import Report, gone_since, pids, send_over_http, send_to_scheduler, serving
from tests.safety.table import CHAT, ENGINE, RESPONSES, TEXT, TURNS, cases
from tests.servers import RunningServer


def send_table(server: RunningServer, run_dir: RunDir, *, one_in: int = 1) -> dict[str, Report]:
    """Every `one_in`-th case of every door, and what came of them. A process that died or held something is a fault."""
    before = pids(server)
    reports = {}
    for door in (CHAT, TEXT, RESPONSES, TURNS, ENGINE):
        chosen = cases(door)[::one_in]
        reports[door] = send_to_scheduler(run_dir, chosen) if door == ENGINE else send_over_http(server, door, chosen)
        reports[door].deaths = len(gone_since(server, before))
    server.wait_until_nothing_is_held()
    return reports


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimised", action="store_true", help="run every process of the server under python -O")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), optimised=options.optimised) as (server, run_dir),
    ):
        reports = send_table(server, run_dir)
    for door, report in reports.items():
        counts = f"{report.cases} cases, {len(report.wrong)} wrong, {report.deaths} deaths"
        print(f"{door}: {counts}, {report.witnesses} witnesses")
        print(
            *(f"  {line}" for line in report.wrong), sep="\n" if report.wrong else "", end="\n" if report.wrong else ""
        )
    return int(any(report.wrong or report.deaths for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
