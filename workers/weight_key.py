"""What packed weights depend on, as the name of the file that keeps them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from kernels.backend import KernelBackend
from kernels.native.build import build_key
from novainfer.config import ModelConfig
from workers.checkpoint import find_checkpoint
from workers.tensor_parallel import TensorParallel

_ROOT = Path(__file__).parent.parent
# Who decides which tensors there are, in which order, and what is in them.
_SOURCES = ("workers/models", "workers/layers", "workers/quantized", "workers/weights.py", "kernels/linear", "kernels")
_CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.py")  # the last with --trust-remote-code
_KEY_BYTES = 16


def weight_key(config: ModelConfig, kernels: KernelBackend, tp: TensorParallel) -> str:
    """The same for the same bytes only: of this rank, in the layout of these kernels, from this checkpoint."""
    folder = find_checkpoint(config.model, config.revision)
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in (
        f"{config.dtype} {config.quantization} {config.model_backend}",
        f"{tp.rank} of {tp.world_size}, {kernels.name} {kernels.isa} {build_key()}",
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        *_identities(folder),
    ):
        digest.update(part.encode() + b"\0")
    for source in _sources():
        digest.update(source.read_bytes() + b"\0")
    return digest.hexdigest()


def _identities(folder: Path) -> Iterator[str]:
    """Of the checkpoint's files: who writes to one, or puts another in its place, changes its times or its number."""
    for path in sorted(path for pattern in _CHECKPOINT_FILES for path in folder.glob(pattern)):
        stat = os.stat(path)
        yield f"{path.name} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _sources() -> Iterator[Path]:
    for name in _SOURCES:
        path = _ROOT / name
        yield from sorted(path.glob("*.py")) if path.is_dir() else (path,)
