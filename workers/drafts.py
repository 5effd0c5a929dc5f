"""Which drafts came true."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.request_states import RequestStates
from workers.row_sampling import IntArray

NOT_FINITE = -1  # stands for the token of a place whose logits were not finite


def true_places(tokens: IntArray, rows: IntArray, ahead: IntArray, states: RequestStates) -> npt.NDArray[np.bool_]:
    """Which of the places [S] count: the first of each row, and each behind drafts that are what was sampled.

    tokens: what was sampled there, the places of one row next to each other; ahead: the drafts before each place. A
    place behind drafts whose logits were not finite does not count: the next step comes to it without them.
    """
    positions = np.maximum(states.num_tokens[rows] + ahead - 1, 0)
    drafts = states.token_ids.numpy()[rows, positions]  # those before each place
    fails = (ahead > 0) & ((np.roll(tokens, 1) != drafts) | (tokens == NOT_FINITE))
    failed = np.cumsum(fails)
    kept: npt.NDArray[np.bool_] = failed == failed[np.arange(len(rows)) - ahead]
    return kept
