"""What a group computes with, and computes, at its start, as one short text: who takes over from it must say the same.

Weights that were packed wrongly, a table with other last bits, another instruction set: what went wrong once while
a group was loading would be in every token after it. Here it shows before the first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from novainfer.errors import EngineError
from novainfer.mode import Mode
from novainfer.protocol.step import WORKER_SCHEMA, StepResult
from workers.tensor_parallel import TensorParallel

_OURS = ("workers.", "kernels.")
_WORD = 8  # bytes


class StrangeRankError(EngineError):
    """This group computes something else than the one whose place it is to take."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(f"these ranks compute otherwise than those before them (fingerprint {fingerprint})")
        self.fingerprint = fingerprint


def fingerprint(mode: Mode, tp: TensorParallel, checksum: int, results: Sequence[StepResult]) -> str:
    """Of the mode, of each rank's `checksum_of` its model, and of the results of some first steps.

    All ranks call it. Rank 0, which has the results, has the group's fingerprint; the others have an empty one.
    """
    checksums = tp.gather_number(checksum)
    if tp.rank > 0:
        return ""
    digest = hashlib.blake2b(f"{mode} {checksums}".encode(), digest_size=8)
    for result in results:
        digest.update(WORKER_SCHEMA.encode(result))
    return digest.hexdigest()


def check_fingerprint(found: str, known: Sequence[str]) -> None:
    """Raises `StrangeRankError` if others were there before, and this is none of theirs."""
    if found and known and found not in known:
        raise StrangeRankError(found)


def checksum_of(model: object) -> int:
    """The sum of the 64-bit words of all tensors that it holds: weights as they were packed, norms, tables.

    To be taken before the first step, whose buffers may hold anything.
    """
    total = torch.zeros((), dtype=torch.int64)
    for tensor in _tensors_of(model):
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        if data.storage_offset() % _WORD:
            data = data.clone()
        whole = len(data) // _WORD * _WORD
        total += data[:whole].view(torch.int64).sum().cpu() + data[whole:].sum(dtype=torch.int64).cpu()
    return int(total)


def _tensors_of(thing: object) -> Iterator[Tensor]:
    """Each once: its own, and those of what it holds that is of our making."""
    seen: set[int] = set()
    left = [thing]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            left.extend(item)
        elif type(item).__module__.startswith(_OURS):
            slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            left.extend(getattr(item, name) for name in slots if hasattr(item, name))
            left.extend(getattr(item, "__dict__", {}).values())
