"""Prompt lookup in numpy; the definition stands in the package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.prompt_lookup import MAX_MATCH, MIN_MATCH

IntArray = npt.NDArray[np.int64]


def find_drafts(
    token_ids: npt.NDArray[np.int32], rows: IntArray, num_tokens: IntArray, most: IntArray
) -> npt.NDArray[np.int64]:
    """Write drafts behind the tokens of `rows`; see `KernelBackend.find_drafts`."""
    counts = np.zeros(len(rows), np.int64)
    for i, (row, n, limit) in enumerate(zip(rows.tolist(), num_tokens.tolist(), most.tolist(), strict=True)):
        place = _best_place(token_ids[row, :n]) if limit else -1
        if place < 0:
            continue
        period = n - 1 - place
        for position in range(n, n + limit):
            token_ids[row, position] = token_ids[row, position - period]
        counts[i] = limit
    return counts


def _best_place(tokens: npt.NDArray[np.int32]) -> int:
    """The place that matches best, -1 if none does well enough."""
    n = len(tokens)
    if n <= MIN_MATCH:
        return -1
    places = np.arange(MIN_MATCH - 1, n - 1)
    best = -1
    for back in range(MAX_MATCH):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[n - 1 - back]]
        if not len(places):
            break
        if back + 1 >= MIN_MATCH:
            best = int(places[-1])
    return best
