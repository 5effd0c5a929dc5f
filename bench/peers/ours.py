"""NovaInfer itself, from this checkout, with the same room for KV as every peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.http_stream import Target
from bench.peers import base
from bench.server import started_server
from bench.serving import first_model
from novainfer import __version__


@dataclass(frozen=True, slots=True)
class Ours:
    """`novainfer serve`, with flags of its own where a comparison wants some."""

    name: str = "ours"
    precision: str = "bf16"
    package: str = "ours"
    flags: tuple[str, ...] = ()

    def install(self, folder: Path) -> None:
        """As `Peer`: `make setup` has done it."""

    def version(self, folder: Path) -> str | None:
        """As `Peer`."""
        return __version__

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[base.Running]:
        """As `Peer`; the server chooses a port itself, without a race for it."""
        kv_mib = base.KV_TOKENS * base.KV_BYTES_PER_TOKEN // 2**20
        limits = ("--max-model-len", str(base.MAX_MODEL_LEN), "--kv-cache-memory-mib", str(kv_mib))
        with started_server(str(checkpoint), *limits, *self.flags) as server:
            target = Target(server.base_url)
            driver = base.HttpDriver(target, first_model(target))
            yield base.Running(driver, server.base_url, server.pid, server.seconds)
