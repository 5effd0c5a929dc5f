"""llama.cpp's llama-server, over HTTP with token ids; built from the sources inside the sdist of llama-cpp-python.

The checkpoint is converted to GGUF once (bf16, and Q8_0 for the comparison of 8 bits), by llama.cpp's own converter
in our interpreter, which has what that needs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.http_stream import Target
from bench.peers import base
from bench.peers.installing import Installation, fingerprint, run_logged
from bench.peers.processes import running
from bench.report import REPOSITORY

VERSION = "0.3.36"  # of llama-cpp-python
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
    # GCC 12 takes `_tile_loadconfig` to read eight bytes and drops what is stored behind: Q8_0 dies on AMX (SIGILL)
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",
)


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """`llama-server` with weights of one type."""

    name: str
    precision: str
    gguf_type: str  # of llama.cpp's converter
    package: str = "llama"

    def install(self, folder: Path) -> None:
        """As `Peer`."""
        installation = _installation(folder)
        if installation.is_whole():
            return
        with installation.made():
            if not _sources(folder).is_dir():
                _fetch_sources(installation)
            build = folder / "build"
            installation.run("cmake", "-S", _sources(folder), "-B", build, *_CMAKE_OPTIONS)
            installation.run("cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count() or 1))

    def version(self, folder: Path) -> str | None:
        """As `Peer`."""
        return f"llama-cpp-python {VERSION}'s" if _installation(folder).is_whole() else None

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[base.Running]:
        """As `Peer`; converts the checkpoint before the clock runs."""
        model = converted(folder, checkpoint, self.gguf_type)
        options = (
            *("--alias", checkpoint.name, "--host", "127.0.0.1", "--port", str(port), "--jinja"),
            *("--threads", str(base.num_cores()), "--parallel", str(base.MAX_SEQUENCES)),
            *("--ctx-size", str(base.KV_TOKENS)),  # fp16, its default: as large as bf16, which its fast attention lacks
        )
        command = (folder / "build" / "bin" / "llama-server", "--model", model, *options)
        with running(self.name, command, env=base.environment(), log=folder / "server.log") as child:
            base_url = f"http://127.0.0.1:{port}"
            ready = base.wait_for_http(child, f"{base_url}/health")
            yield base.Running(base.HttpDriver(Target(base_url), checkpoint.name), base_url, child.process.pid, ready)


def converted(folder: Path, checkpoint: Path, gguf_type: str) -> Path:
    """The checkpoint as GGUF, made when it is not there. Raises SystemExit."""
    model = folder / "models" / f"{fingerprint(checkpoint)}-{gguf_type}.gguf"
    if not model.is_file():
        model.parent.mkdir(parents=True, exist_ok=True)
        half = model.with_suffix(".half")
        command = (sys.executable, "-m", "bench.peers.gguf_convert", _sources(folder), checkpoint)
        run_logged((*command, "--outfile", half, "--outtype", gguf_type), folder / "convert.log", cwd=REPOSITORY)
        half.rename(model)
    return model


def _installation(folder: Path) -> Installation:
    return Installation(folder, (f"llama-cpp-python=={VERSION}", *_CMAKE_OPTIONS))


def _sources(folder: Path) -> Path:
    return folder / "llama.cpp"


def _fetch_sources(installation: Installation) -> None:
    """The part of the sdist that is llama.cpp."""
    name = f"llama-cpp-python=={VERSION}"
    installation.run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", "."), name
    )
    (archive,) = installation.folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
        members = [member for member in tar.getmembers() if member.name.startswith(f"{inside}/")]
        for member in members:
            member.name = str(Path("llama.cpp") / Path(member.name).relative_to(inside))
        tar.extractall(installation.folder, members, filter="data")
    archive.unlink()
