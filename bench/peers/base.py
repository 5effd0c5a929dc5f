"""What every peer is to the comparison: something to install, to start on a checkpoint, and to send requests to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import psutil

from bench import serving, workloads
from bench.http_stream import Target
from bench.peers.processes import Child

# All peers get the same room for KV: 24,576 tokens of 114,688 bytes each in the 0.6B shape, for 16 sequences of 1,536.
MAX_SEQUENCES = 16
MAX_MODEL_LEN = 1536
KV_TOKENS = MAX_SEQUENCES * MAX_MODEL_LEN
KV_BYTES_PER_TOKEN = 114_688

READY_TIMEOUT = 600.0  # seconds
_CHAT_TIMEOUT = 600.0


class Driver(Protocol):
    """Sends requests to one running peer and measures them."""

    def run(self, items: Sequence[workloads.Item], max_concurrency: int) -> list[serving.Measured]:
        """Send all, at most `max_concurrency` at a time, and wait for every end; in the order of the items."""
        ...

    def chat(self, text: str) -> float | None:
        """Seconds of one chat answer of one token, not streamed; None where the peer has no such API."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that is ready."""

    driver: Driver
    base_url: str  # without /v1; empty for a peer without HTTP
    pid: int  # the root of its process tree
    ready_seconds: float  # from the start of its process


class Peer(Protocol):
    """One server and its settings. What `install` makes is below `folder` and nowhere else."""

    @property
    def name(self) -> str:
        """As on the command line and in the table."""
        ...

    @property
    def precision(self) -> str:
        """Of weights and activations: only peers of one precision do the same work."""
        ...

    @property
    def package(self) -> str:
        """Name of the installation, which several settings of one server share."""
        ...

    def install(self, folder: Path) -> None:
        """Set it up, at pinned versions; at once when it is there. Raises SystemExit."""
        ...

    def version(self, folder: Path) -> str | None:
        """What is installed; None if nothing is, or not all of it."""
        ...

    def start(self, folder: Path, checkpoint: Path, port: int) -> AbstractContextManager[Running]:
        """Serve a checkpoint in bf16, without speculation. Its whole process tree has ended afterwards."""
        ...


def peers_root() -> Path:
    """Where all peers lie."""
    chosen = os.environ.get("NOVAINFER_PEERS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "novainfer" / "peers"


def folder_of(peer: Peer) -> Path:
    """Where one peer lies."""
    return peers_root() / peer.package


def environment(**extra: str) -> dict[str, str]:
    """Ours for a peer: it fetches nothing from a hub, reports nothing, and no proxy stands between it and the load.

    How its threads wait is its own affair: `OMP_WAIT_POLICY` is what `import workers` says for ours.
    """
    ours = {"PYTHONPATH", "VIRTUAL_ENV", "OMP_WAIT_POLICY"}
    dropped = ours | {"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    return {**kept, **quiet, **extra}


@dataclass(frozen=True, slots=True)
class HttpDriver:
    """The load over OpenAI's API."""

    target: Target
    model: str

    def run(self, items: Sequence[workloads.Item], max_concurrency: int) -> list[serving.Measured]:
        """As `Driver`."""
        load = serving.Load(float("inf"), 1.0, max_concurrency)
        return asyncio.run(serving.run(self.target, self.model, items, load))

    def chat(self, text: str) -> float | None:
        """As `Driver`. Raises OSError and ValueError when the answer is not as it should be."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0.0,
        }
        url = urlsplit(self.target.base_url)
        began = time.perf_counter()
        connection = http.client.HTTPConnection(url.netloc, timeout=_CHAT_TIMEOUT)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        seconds = time.perf_counter() - began
        if answer.status != 200 or json.loads(content)["usage"]["completion_tokens"] != 1:
            raise ValueError(f"chat: HTTP {answer.status} {content[:200]!r}")
        return seconds


def wait_for_http(child: Child, url: str) -> float:
    """Seconds from the child's start until `url` answers with 200. Raises SystemExit if it never does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.perf_counter() - child.began < READY_TIMEOUT:
        if not child.is_alive():
            raise SystemExit(f"{child.name} has ended before it was ready:\n{child.last_lines()}")
        with contextlib.suppress(OSError, http.client.HTTPException), opener.open(url, timeout=5) as answer:
            if answer.status == 200:
                return time.perf_counter() - child.began
        time.sleep(0.05)  # from outside nothing tells when another's server is ready
    raise SystemExit(f"{child.name} was not ready after {READY_TIMEOUT:.0f} s:\n{child.last_lines()}")


def cpu_list() -> str:
    """The cores that we may use, for options that want them by number."""
    return ",".join(str(core) for core in psutil.Process().cpu_affinity())


def num_cores() -> int:
    """How many those are."""
    return len(psutil.Process().cpu_affinity())
