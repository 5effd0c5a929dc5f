"""What a group computes at its start, as one short text: every group that takes over from another must say the same.

Weights that were packed wrongly, a table with other last bits, another instruction set: what went wrong once while
a group was loading would be in every token after it. Here it shows before the first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from novainfer.errors import EngineError
from novainfer.mode import Mode
from novainfer.protocol.step import WORKER_SCHEMA, StepResult
from workers.tensor_parallel import TensorParallel


class StrangeRankError(EngineError):
    """This group computes something else than the one whose place it is to take."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(f"these ranks compute otherwise than those before them (fingerprint {fingerprint})")
        self.fingerprint = fingerprint


def fingerprint(mode: Mode, tp: TensorParallel, tables: Sequence[Tensor], results: Sequence[StepResult]) -> str:
    """Of the mode and, where it promises equal bits, of all ranks' tables and the first steps' results.

    All ranks call it. Rank 0, which has the results, has the group's fingerprint; the others have an empty one.
    """
    sums = [table.view(torch.int32).sum(dtype=torch.int64) for table in tables]
    of_all_ranks = tp.gather_columns(torch.stack(sums).unsqueeze(0)).tolist() if sums else []
    if tp.rank > 0:
        return ""
    digest = hashlib.blake2b(str(mode).encode(), digest_size=8)
    if mode.is_exact:
        digest.update(str(of_all_ranks).encode())
        for result in results:
            digest.update(WORKER_SCHEMA.encode(result))
    return digest.hexdigest()


def check_fingerprint(found: str, known: Sequence[str]) -> None:
    """Raises `StrangeRankError` if others were there before, and this is none of theirs."""
    if found and known and found not in known:
        raise StrangeRankError(found)
