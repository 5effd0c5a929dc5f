"""A gateway in this process for tests: the real server on a real port, in front of a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import psutil

from gateway.auth import KeyRing
from gateway.process import GatewayServer, bind_http, build_server
from gateway.service import GatewayService
from novainfer.client.engine_client import EngineClient
from novainfer.config import ModelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints.keys import seal_keys
from novainfer.transport.addresses import Endpoint
from tests.fakes import ScriptedScheduler

SERVED_NAME = "org/tiny"


def config_for(model: Path, **server: object) -> ServeConfig:
    """A configuration for the checkpoint in `model` on any free port."""
    settings = replace(ServerConfig(port=0, drain_timeout=10.0, log_level="error"), **server)  # type: ignore[arg-type]
    names = ModelConfig(model=str(model), served_model_name=(SERVED_NAME, "alias"))
    return seal_keys(ServeConfig(model=names, server=settings))


class GatewayThread:
    """Runs a gateway in a thread until closed. `service` and `server` are for looking, not for touching."""

    def __init__(
        self, config: ServeConfig, endpoint: Endpoint, *, lost_timeout: float = 15.0, is_successor: bool = False
    ) -> None:
        self.listener = bind_http(config.server)
        self.port: int = self.listener.getsockname()[1]
        self.client = EngineClient(endpoint, gateway_id="gateway-0", lost_timeout=lost_timeout)
        self.service = GatewayService(config, self.client, is_successor=is_successor)
        self.server: GatewayServer = build_server(
            self.service,
            KeyRing.of(config),
            drain_timeout=config.server.drain_timeout,
            log_level=config.server.log_level,
        )
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="gateway")
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve([self.listener]))

    @property
    def url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.port}"

    def http(self, **headers: str) -> httpx.Client:
        """A client that ignores proxies; close it."""
        # Without certificates to load, a client is cheap to make.
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=30.0, headers=headers)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The SDK, without retries; close it."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30.0, http_client=sdk_http_client()
        )

    def text_processes(self) -> dict[str, psutil.Process]:
        """The zygote and what it has forked, by title: "zygote", "0" for short texts, "1" for long ones."""
        return text_processes(psutil.Process(os.getpid()), self.service.text.zygote_pid)

    def wait_ready(self) -> None:
        """Block until `/readyz` is 200."""
        assert self.loop is not None or self._thread.is_alive()
        while self.loop is None:
            self._thread.join(0.01)
        asyncio.run_coroutine_threadsafe(self.client.wait_ready(), self.loop).result(20)

    def close(self) -> None:
        """Stop at once."""
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the gateway did not stop"


def text_processes(gateway: psutil.Process, zygote: int = 0) -> dict[str, psutil.Process]:
    """Those of a gateway, by the last word of their titles; of several gateways in one process name the `zygote`."""
    found = {}
    for process in gateway.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just been replaced
            title = " ".join(process.cmdline()).strip("\0 ")
            if " text " in title and zygote in (0, process.pid, process.ppid()):
                found[title.rpartition(" ")[2]] = process
    return found


def sdk_http_client() -> httpx.Client:
    """The SDK's own kind of HTTP client with proxies disabled."""
    return openai.DefaultHttpxClient(trust_env=False, verify=False)


def start_pair(
    model: Path, run_dir: Path, vocab_size: int, **server: object
) -> tuple[ScriptedScheduler, GatewayThread]:
    """A scripted scheduler and a ready gateway in front of it. Close both."""
    run_dir.mkdir(mode=0o700, exist_ok=True)
    endpoint = Endpoint(f"ipc://{run_dir}/scheduler-0.gateways")
    scheduler = ScriptedScheduler(endpoint, vocab_size=vocab_size)
    gateway = GatewayThread(config_for(model, **server), endpoint)
    gateway.wait_ready()
    return scheduler, gateway
