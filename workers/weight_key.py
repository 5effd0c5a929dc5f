"""What packed weights depend on, as the name of the file that keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from kernels.backend import KernelBackend
from kernels.native.build import build_key
from novainfer.config import ModelConfig
from workers.checkpoint import find_checkpoint
from workers.tensor_parallel import TensorParallel
from workers.weight_ahead import KEY_BYTES, weight_label

_ROOT = Path(__file__).parent.parent
# Who decides which tensors there are, in which order, and what is in them.
_SOURCES = (
    "workers/models",
    "workers/layers",
    "workers/quantized",
    "workers/tensor_parallel.py",
    "workers/weights.py",
    "workers/kept_config.py",
    "kernels/linear",
    "kernels/native",
    "kernels",
)


def weight_key(config: ModelConfig, kernels: KernelBackend, tp: TensorParallel) -> str:
    """The same for the same bytes only: of this rank, in the layout of these kernels, from this checkpoint."""
    label = weight_label(find_checkpoint(config.model, config.revision), config, tp.rank, tp.world_size)
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (
        f"{kernels.name} {kernels.isa} {build_key()}",
        f"torch {torch.__version__}, transformers {version('transformers')}",
    ):
        digest.update(part.encode() + b"\0")
    for source in _sources():
        digest.update(source.read_bytes() + b"\0")
    return f"{label}-{digest.hexdigest()}"


def _sources() -> Iterator[Path]:
    for name in _SOURCES:
        path = _ROOT / name
        yield from sorted(path.glob("*.py")) if path.is_dir() else (path,)
