"""A gateway process: `python -m gateway.process --run-dir DIR --index I`.

It listens at once (`/readyz` says 503 until the engine is ready), reports to the supervisor, drains on SIGTERM and
exits 0; it dies with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
import zmq
from setproctitle import setproctitle

from gateway.app import create_app
from gateway.auth import KeyRing
from gateway.door import Door
from gateway.metrics_files import MetricsFiles
from gateway.service import GatewayService
from novainfer.client.engine_client import EngineClient
from novainfer.config import ServeConfig, ServerConfig
from novainfer.errors import ConfigError, EngineError, words_of
from novainfer.logs import configure
from novainfer.protocol.supervision import (
    FIRST_EPOCH,
    GIVE_UP_SIGNAL,
    ROLE_GATEWAY,
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    GatewayPulse,
)
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import connect_push
from novainfer.transport.parent import die_with_parent
from novainfer.transport.replicas import ReplicasFile

log = logging.getLogger("gateway")

KEEP_ALIVE_TIMEOUT = 75  # seconds; above the usual 60 of a load balancer, so that it is the one to close
_PULSE_INTERVAL = 0.25  # seconds
_PUBLISH_INTERVAL = 1.0  # seconds
_LAST_WORDS_SECONDS = 2.0  # for error events to reach their clients after the drain timeout
_BACKLOG = 2048
_MAX_FILES = 65536
_GC_THRESHOLD = 7_000  # ten times the usual: answered requests leave no circles, and all live ones are looked at


class GatewayServer(uvicorn.Server):
    """uvicorn, except that SIGTERM drains first: the port stays open and answers 503 while streams finish."""

    def __init__(self, config: uvicorn.Config, service: GatewayService, drain_timeout: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout = drain_timeout  # looked at all the time: a drain that goes on may be cut short
        self._farewell = "The server is shutting down."
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run until drained."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: nobody signals us
            self._loop.add_signal_handler(GIVE_UP_SIGNAL, self.give_up)
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM: drain; once more: leave now. Not kept for re-raising, so the exit code is 0. SIGUSR1: see `give_up`.

        Ctrl-C reaches the whole process group; what it means the supervisor decides.
        """
        if self._loop is not None and sig != signal.SIGINT:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def give_up(self) -> None:
        """The engine will not come back: end every stream with an error, also of a drain that goes on, then stop."""
        self._drain_timeout = 0.0
        self._farewell = "The engine failed for good."
        if self._drain_task is None:
            self.begin_drain()

    def begin_drain(self) -> None:
        """Refuse what is new, then stop when the rest has ended. A second call stops at once."""
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        limits = self._service.limits
        limits.draining = True
        log.info("draining: %d live requests", limits.num_live)
        await self._until_idle(lambda: self._drain_timeout)
        if limits.num_live:
            self._service.client.fail_all(EngineError(self._farewell), tell_engine=True)
            await self._until_idle(lambda: _LAST_WORDS_SECONDS)
        self.should_exit = True

    async def _until_idle(self, seconds: Callable[[], float]) -> None:
        began = time.monotonic()
        while self._service.limits.num_live and time.monotonic() - began < seconds():
            await asyncio.sleep(0.02)


def build_server(
    service: GatewayService, keys: KeyRing, *, drain_timeout: float, log_level: str = "info"
) -> GatewayServer:
    """The HTTP server around a service; needs a bound socket to serve on."""
    config = uvicorn.Config(
        create_app(service, keys),
        interface="asgi3",  # uvicorn would look for a coroutine function
        http=_http_protocol(service.config.server.client_stall_timeout, Door(service, keys)),
        loop="auto",
        ws="none",
        lifespan="on",
        log_level=log_level,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
        timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
        backlog=_BACKLOG,
    )
    return GatewayServer(config, service, drain_timeout)


def _http_protocol(stall_seconds: float, door: Door) -> Any:
    """Ours where httptools is there, else uvicorn's h11, which bounds the size of headers itself."""
    if importlib.util.find_spec("httptools") is None:
        return "h11"
    from gateway.connection import bounded_protocol  # imports httptools

    return bounded_protocol(stall_seconds, door)


def bind_http(config: ServerConfig, *, port: int | None = None) -> socket.socket:
    """The listening socket. Several gateways share one port, and the kernel deals the connections out.

    Raises `ConfigError` when the address cannot be had.
    """
    wanted = config.port if port is None else port
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(config.host, wanted, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.num_gateways > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{wanted}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


class Reporter:
    """Tells the supervisor."""

    def __init__(self, run_dir: RunDir, index: int, epoch: int) -> None:
        self.index = index
        self.epoch = epoch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect_push(self._context, run_dir.supervisor())

    def send(self, message: object) -> None:
        """Send one record; never blocks."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(SUPERVISOR_SCHEMA.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Let a last word out, for a second at most."""
        self._socket.close()
        self._context.term()


@dataclass(frozen=True, slots=True)
class Membership:
    """Which replicas there are, as the supervisor writes it and the client goes by."""

    file: ReplicasFile
    run_dir: RunDir
    client: EngineClient

    async def follow(self, seen: int) -> int:
        """Go by the newest version, if it is newer than the one that was `seen`; which it is."""
        replicas = self.file.read()
        if replicas.version != seen:
            await self.client.follow(replicas.endpoints(self.run_dir), replicas.states)
        return replicas.version


async def _serve(
    server: GatewayServer,
    service: GatewayService,
    listener: socket.socket,
    report: Reporter,
    membership: Membership,
) -> None:
    port = listener.getsockname()[1]
    report.send(ChildStarted(ROLE_GATEWAY, report.index, os.getpid(), port, report.epoch))
    reports = [
        asyncio.ensure_future(_report_ready(service, report)),
        asyncio.ensure_future(_report_pulse(report, membership)),
        asyncio.ensure_future(_publish(service)),
    ]
    try:
        await server.serve([listener])
    finally:
        for task in reports:
            task.cancel()
        service.metrics.publish()


async def _report_ready(service: GatewayService, report: Reporter) -> None:
    await service.client.wait_ready()
    engine = service.client.limits
    if engine is not None and engine.mode.startswith("cpu"):
        _be_patient()
    report.send(ChildReady(ROLE_GATEWAY, report.index, report.epoch))


def _be_patient() -> None:
    """Have a turn when a rank's has ended, not in its midst: that would stop its whole group, and each time for little.

    Hundreds of requests a second, each refused at once, would cost CPU ranks a few percent of their tokens.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


async def _report_pulse(report: Reporter, membership: Membership) -> None:
    version, is_failing = 0, False
    while True:
        try:
            version, is_failing = await membership.follow(version), False
        except OSError as error:  # no file can be opened, say: it lives all the same, and goes by what it knew last
            if not is_failing:
                log.warning("cannot read which replicas there are, and goes on trying: %s", error)
            is_failing = True
        live = membership.client.live_by_replica
        report.send(GatewayPulse(report.index, report.epoch, version, list(live), list(live.values())))
        await asyncio.sleep(_PULSE_INTERVAL)


async def _publish(service: GatewayService) -> None:
    while True:
        service.metrics.publish()
        await asyncio.sleep(_PUBLISH_INTERVAL)


def _run(run_dir: RunDir, index: int, port: int | None, report: Reporter) -> None:
    config = ServeConfig.from_json(run_dir.config_file.read_text(encoding="utf-8"))
    configure(f"gateway {index}", config.server)
    listener = bind_http(config.server, port=port)  # first: a taken port is the commonest fault
    keys = KeyRing.of(config)
    replicas = ReplicasFile(run_dir)
    client = EngineClient(
        replicas.read().endpoints(run_dir),
        gateway_id=f"gateway-{index}",
        drain_timeout=config.server.drain_timeout,
    )
    is_successor = report.epoch > FIRST_EPOCH
    service = GatewayService(config, client, index=index, is_successor=is_successor)
    service.metrics.share(MetricsFiles(run_dir, index, is_successor=is_successor))
    gc.collect()
    gc.freeze()  # what is there now stays: no collection in mid-request need look at it
    gc.set_threshold(_GC_THRESHOLD)
    server = build_server(service, keys, drain_timeout=config.server.drain_timeout, log_level=config.server.log_level)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, service, listener, report, Membership(replicas, run_dir, client)))


def _raise_file_limit() -> None:
    """Each stream is a file; the usual soft limit of 1024 is less than one gateway holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_MAX_FILES, hard) if hard != resource.RLIM_INFINITY else _MAX_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: list[str] | None = None) -> int:
    """Run one gateway to its end; the exit code is 0 after a drain, 2 for a configuration that cannot work."""
    parser = argparse.ArgumentParser(prog="gateway", description="HTTP gateway process of NovaInfer.")
    parser.add_argument("--run-dir", required=True, help="directory with config.json and the sockets")
    parser.add_argument("--index", type=int, default=0, help="number of this gateway")
    parser.add_argument("--epoch", type=int, default=FIRST_EPOCH, help="how many times this gateway was started")
    parser.add_argument("--port", type=int, help="HTTP port in place of the configured one")
    options = parser.parse_args(argv)
    die_with_parent()
    setproctitle(f"novainfer: gateway {options.index}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the supervisor decides
    for number in (signal.SIGTERM, GIVE_UP_SIGNAL):
        signal.signal(number, lambda *_: sys.exit(0))  # until the server takes it: nothing to drain yet
    _raise_file_limit()
    run_dir = RunDir.create(options.run_dir)
    report = Reporter(run_dir, options.index, options.epoch)
    try:
        _run(run_dir, options.index, options.port, report)
    except ConfigError as error:
        report.send(ChildFault(ROLE_GATEWAY, options.index, options.epoch, words_of(error)))
        print(f"gateway {options.index}: {words_of(error)}", file=sys.stderr)
        return 2
    finally:
        report.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
