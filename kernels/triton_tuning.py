"""How many warps and stages a Triton kernel is launched with: a table that ships, made by `python -m bench.tune_gpu`.

Nothing is tried out while a server runs. A table is for one kind of GPU, `tuning/<its name>.json`; a kernel or a shape
that it does not have, and a GPU without a table, get the default that the kernel's author names. Only what changes no
bit of a result is in it: tiles, chunks and the orders of sums are constants of the kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.kv_store.reference import is_float8

Choice = tuple[int, int]  # warps, stages

FOLDER = Path(__file__).parent / "tuning"
_forced: dict[str, Choice] = {}


def launch_options(kernel: str, device: torch.device, default: Choice, **features: int) -> dict[str, int]:
    """num_warps and num_stages of a launch; features: what the best choice depends on, beside the GPU."""
    given = tuple(sorted(features.items()))
    choice = _forced.get(table_key(kernel, features)) if _forced else None
    warps, stages = choice or _chosen(kernel, device, default, given)
    return {"num_warps": warps, "num_stages": stages}


def table_key(kernel: str, features: dict[str, int]) -> str:
    """In the table's file: the kernel's name and its features by name."""
    return " ".join([kernel, *(f"{name}={value}" for name, value in sorted(features.items()))])


def table_path(device_name: str) -> Path:
    """Where the table of a GPU of this name lies."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def read_table(path: Path) -> dict[str, Choice]:
    """A table's choices; empty where there is no such file. Raises ValueError for a file that is none."""
    if not path.is_file():
        return {}
    choices = json.loads(path.read_text(encoding="utf-8"))["choices"]
    found = {str(key): (int(warps), int(stages)) for key, (warps, stages) in choices.items()}
    if any(warps not in (1, 2, 4, 8, 16) or not 1 <= stages <= 8 for warps, stages in found.values()):
        raise ValueError(f"{path} has launches that no GPU takes")
    return found


def attention_features(query: Tensor, key_cache: Tensor) -> dict[str, int]:
    """What the best launch of attention depends on: query [T, H, D], keys as they are stored [..., D]."""
    return {"head_dim": query.shape[-1], "itemsize": query.element_size(), "float8": int(is_float8(key_cache))}


@contextmanager
def forced(choices: dict[str, Choice]) -> Iterator[None]:
    """These go before the table, for whoever makes one."""
    _forced.update(choices)
    try:
        yield
    finally:
        for key in choices:
            del _forced[key]


@cache
def _chosen(kernel: str, device: torch.device, default: Choice, features: tuple[tuple[str, int], ...]) -> Choice:
    return _table_of(device).get(table_key(kernel, dict(features)), default)


@cache
def _table_of(device: torch.device) -> dict[str, Choice]:
    return read_table(table_path(torch.cuda.get_device_name(device))) if device.type == "cuda" else {}
