"""Compiles the native kernels into a cache folder; `python -m kernels.native.build` does it ahead of time.

One library per instruction set, in a folder named after the hash of the sources and the flags, so that a stale one is
never loaded. The compiler is not part of the name: an image without a compiler finds what was built when
the image was made.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16", "-mavx512vbmi")
_AMX_BF16 = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16")
ISA_FLAGS = {"amxbf16": _AMX_BF16, "avx512bf16": _AVX512_BF16, "avx512vnni": _AVX512_VNNI, "avx512f": _AVX512,
             "avx2": _AVX2, "portable": ()}  # fmt: skip
# What only tests load: tiles without the instructions for them (emulated_tiles.h).
EMULATED_TILES = "emulatedtiles"
_EMULATED_FLAGS = {EMULATED_TILES: (*_AVX512_BF16, "-DNOVA_EMULATED_TILES")}
# The kernels are written in vectors and unrolled by hand, so -O2 gives the speed of -O3 in a third of the time. Fused
# products are spelled out: the compiler must not choose them.
_FLAGS = (
    *("-std=c++17", "-O2", "-fno-tree-vectorize", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-pthread", "-w"),
)
_PROBE = "probe"
_COMPILE_TIMEOUT_S = 600


class NativeBuildError(RuntimeError):
    """The native kernels cannot be built here; the message says why."""


def host_isas() -> tuple[str, ...]:
    """The instruction sets that this machine's architecture has names for, best first."""
    return tuple(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ("portable",)


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this processor can run, best first. Raises NativeBuildError."""
    probe = ctypes.CDLL(str(library_path(_PROBE)))
    probe.nova_best_isa.restype = ctypes.c_char_p
    names = host_isas()
    return names[names.index(probe.nova_best_isa().decode()) :]


def runs_here(name: str) -> bool:
    """Whether this processor can run the library of that name. Raises NativeBuildError."""
    return (name if name not in _EMULATED_FLAGS else "avx512bf16") in supported_isas()


def library_path(name: str) -> Path:
    """The library of an instruction set (or the probe), built now if it was not before. Raises NativeBuildError.

    Safe in many processes at once: one compiles, the others wait for it. One that lies in $NOVAINFER_KERNEL_DIR, which
    is only read, is taken as it is.
    """
    built = os.environ.get("NOVAINFER_KERNEL_DIR")
    if built and os.path.isfile(library := Path(built) / build_key() / f"libnova-{name}.so"):
        return library
    folder = cache_dir() / "native" / build_key()
    library = folder / f"libnova-{name}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it if this process dies
            if not library.exists():
                _compile(name, library)
    except OSError as error:
        raise NativeBuildError(f"cannot write {folder}: {error}") from error
    return library


def cache_dir() -> Path:
    """For what is made once on a machine."""
    root = os.environ.get("NOVAINFER_CACHE_DIR")
    return Path(root) if root else Path.home() / ".cache" / "novainfer"


def build_key() -> str:
    """Another one for every change of the kernels."""
    digest = hashlib.sha256()
    parts = (platform.machine(), repr(_FLAGS), repr(ISA_FLAGS), repr(_EMULATED_FLAGS))
    digest.update("\n".join(parts).encode())
    for source in sorted((*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise NativeBuildError("no C++ compiler found (set CXX, or install g++)")


def _compile(name: str, library: Path) -> None:
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        if name == _PROBE:
            _run([compiler, "-O1", "-fPIC", "-shared", str(SOURCE_DIR / "probe.cpp"), "-o", str(output)])
        else:
            source = str(SOURCE_DIR / "isa.cpp")
            flags = (ISA_FLAGS | _EMULATED_FLAGS)[name]
            _run([compiler, *_FLAGS, *flags, f"-DNOVA_ISA={name}", "-shared", source, "-o", str(output)])
        output.replace(library)


def _run(command: list[str]) -> str:
    """Standard output of a compiler call; raises NativeBuildError with its complaint."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]}: {error}") from error
    if result.returncode != 0:
        raise NativeBuildError(f"{command[0]} failed: {result.stderr.strip()[-2000:]}")
    return result.stdout


def main() -> None:
    """Build every instruction set of this architecture that the compiler knows, and print where they lie."""
    for name in (_PROBE, *host_isas()):
        try:
            print(library_path(name))
        except NativeBuildError as error:  # of the best ones: a compiler may be older than they are
            if name in (_PROBE, host_isas()[-1]):
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
