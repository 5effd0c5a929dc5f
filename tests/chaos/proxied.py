"""A server whose ranks reach it over tcp, as those of other hosts do, through proxies: `proxied_server`.

As a script, `python -m tests.chaos.proxied STEPS_PORT REPORTS_PORT serve ...`, it is that server: the real one, but
that the ranks are told the addresses of the proxies, and that Ray is a local one. Keys and sockets are its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from setproctitle import setproctitle

from novainfer.entrypoints.cli import build_parser
from novainfer.entrypoints.keys import seal_keys
from novainfer.entrypoints.launch import standard_launch
from novainfer.entrypoints.options import resolve
from novainfer.entrypoints.serve import held_port, run_directory
from novainfer.entrypoints.supervisor import Supervisor
from novainfer.transport.addresses import Endpoint, RunDir
from tests.chaos.proxy import Proxy
from tests.servers import RunningServer

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Proxied:
    """A server, and the proxies between its ranks and itself."""

    server: RunningServer
    steps: Proxy  # ranks <-> scheduler
    reports: Proxy  # ranks -> supervisor


@contextlib.contextmanager
def proxied_server(*flags: str, log: Path) -> Iterator[Proxied]:
    """Started with these flags; killed at the end if it still runs."""
    with tempfile.TemporaryDirectory(prefix="nova-") as folder, contextlib.ExitStack() as stack:
        run_dir = RunDir(Path(folder) / "run")
        steps = Proxy(lambda: _address(run_dir.workers(0)))
        stack.callback(steps.close)
        reports = Proxy(lambda: _address(run_dir.rank_reports()))
        stack.callback(reports.close)
        module = ("tests.chaos.proxied", str(steps.port), str(reports.port))
        with RunningServer("--run-dir", str(run_dir.path), *flags, log=log, module=module) as server:
            yield Proxied(server, steps, reports)


def _address(endpoint: Endpoint) -> tuple[str, int]:
    url = urlsplit(endpoint.address)
    assert url.scheme == "tcp"
    assert url.hostname is not None
    assert url.port is not None
    return url.hostname, url.port


@dataclass(frozen=True)
class _SeenByRanks(RunDir):
    """The run directory as the ranks are told of it."""

    steps_port: int
    reports_port: int

    def workers(self, replica: int) -> Endpoint:
        return replace(RunDir.workers(self, replica), address=f"tcp://{HOST}:{self.steps_port}")

    def rank_reports(self) -> Endpoint:
        return replace(RunDir.rank_reports(self), address=f"tcp://{HOST}:{self.reports_port}")


def main(argv: list[str]) -> int:
    """Serve; the exit status is the server's."""
    steps_port, reports_port = map(int, argv[:2])
    config = resolve(build_parser()[0].parse_args(argv[2:]), os.environ).config
    config = seal_keys(replace(config, parallel=replace(config.parallel, cluster_host=HOST)))
    setproctitle("novainfer: supervisor")
    level = config.server.log_level.upper()
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s supervisor: %(message)s")
    with held_port(config) as config, run_directory(config) as run_dir:
        from workers.ray_group import RayWorkerGroup

        seen = _SeenByRanks(run_dir.path, steps_port, reports_port)
        launch = replace(standard_launch(config, run_dir), workers=lambda: RayWorkerGroup(config, seen))
        with Supervisor(config, run_dir, launch) as supervisor:
            return supervisor.run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
