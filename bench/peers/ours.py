"""NovaInfer itself, from this checkout, with the same room for KV as every peer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.http_stream import Target
from bench.peers import base
from bench.server import started_server
from bench.serving import first_model
from novainfer import __version__
from workers.weight_ahead import weight_folder

_IDLE_SECONDS = 5.0  # a server that idles so long without a file that it writes has one
_WRITE_SECONDS = 300.0


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
        _write_weights(checkpoint, (*limits, *self.flags))
        with started_server(str(checkpoint), *limits, *self.flags) as server:
            target = Target(server.base_url)
            driver = base.HttpDriver(target, first_model(target))
            yield base.Running(driver, server.base_url, server.pid, server.seconds)


@cache
def _write_weights(checkpoint: Path, flags: tuple[str, ...]) -> None:
    """Once, as others' checkpoints are converted before they are timed: a server that idles writes its packed weights
    down, and those that are timed never do. Raises SystemExit.
    """
    with started_server(str(checkpoint), *flags):
        idle_since = began = time.monotonic()
        while time.monotonic() < idle_since + _IDLE_SECONDS:
            with contextlib.suppress(FileNotFoundError):  # it was whole a moment later
                if any(part.stat().st_mtime > time.time() - 1.0 for part in weight_folder().glob("*.part")):
                    idle_since = time.monotonic()
            if time.monotonic() > began + _WRITE_SECONDS:
                raise SystemExit("the packed weights were not written")
            time.sleep(0.1)  # a file that grows tells nobody
