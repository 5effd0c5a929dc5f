"""Rows that want no token but a vector: the hidden state after the final norm of the last token of their prompt."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from novainfer.protocol.columns import column
from novainfer.protocol.step import StepPlan, StepResult
from workers.row_sampling import IntArray, to_device


class Places(NamedTuple):
    """Where a step has something to tell: see `StepRows`."""

    hidden: Tensor  # [S, hidden size]
    rows: IntArray  # [S]
    ahead: IntArray | None  # [S]; None: there are no drafts


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a step's rows."""

    rows: IntArray  # [E], in the plan's order
    vectors: Tensor  # [E, hidden size] float32

    def add_to(self, result: StepResult, plan: StepPlan) -> None:
        """Put them into the step's result; on the host. A vector that is not finite makes its row a bad one."""
        rows: list[int] = self.rows.tolist()
        is_finite = torch.isfinite(self.vectors).all(dim=1).tolist()
        vectors = self.vectors.numpy().astype("<f4", copy=False)
        for i, row in enumerate(rows):
            if is_finite[i]:
                result.embeddings[row] = vectors[i].tobytes()
        result.bad_rows = sorted({*result.bad_rows, *(row for row in rows if row not in result.embeddings)})
        places = {row: place for place, row in enumerate(plan.rows)}
        logprobs = result.logprobs or [None] * len(result.rows)
        told = [*zip(result.rows, result.token_ids, logprobs, strict=True), *((row, 0, None) for row in rows)]
        told.sort(key=lambda one: places[one[0]])
        result.rows, result.token_ids = column([one[0] for one in told]), column([one[1] for one in told])
        result.logprobs = [one[2] for one in told] if result.logprobs else []


def split_off(places: Places, embedding: Set[int]) -> tuple[Embedded | None, Places]:
    """The vectors of the rows in `embedding`, if any has its place here, and the places of the others."""
    hidden, rows, ahead = places
    embeds = np.isin(rows, list(embedding))
    if not embeds.any():
        return None, places
    index, rest = (to_device(np.flatnonzero(chosen), hidden.device) for chosen in (embeds, ~embeds))
    vectors = hidden[index].float()
    return Embedded(rows[embeds], vectors), Places(
        hidden[rest], rows[~embeds], None if ahead is None else ahead[~embeds]
    )
