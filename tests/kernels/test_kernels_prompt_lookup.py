"""Prompt lookup: the native kernel and the reference find the same drafts, and those that are meant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.backend import KernelBackend
from kernels.cpu_backend import CpuBackend
from kernels.prompt_lookup import MAX_MATCH, MIN_MATCH
from kernels.reference_backend import ReferenceBackend

pytestmark = pytest.mark.stage0

LENGTH = 64


def found(backend: KernelBackend, tokens: list[int], most: int) -> list[int]:
    """The drafts behind one row, which is the second of three."""
    table = np.full((3, LENGTH), -9, np.int32)
    table[1, : len(tokens)] = tokens
    (count,) = backend.find_drafts(table, np.array([1]), np.array([len(tokens)]), np.array([most]))
    assert (table[[0, 2]] == -9).all()
    assert (table[1, len(tokens) + count :] == -9).all()
    drafts: list[int] = table[1, len(tokens) : len(tokens) + count].tolist()
    return drafts


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3], [5, 8, 1, 2]),  # of equal matches the last
        ([7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3], [4, 9, 1, 2]),  # a longer match before a later one
        ([4, 4, 4, 4], [4, 4, 4, 4]),  # the period 1
        ([8, 5, 6, 5, 6, 5, 6], [5, 6, 5, 6]),
        ([1, 2, 3, 1, 2], []),  # two are too few
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_given_a_text_when_looked_up_then_its_drafts_follow_the_best_place(
    backend: KernelBackend, tokens: list[int], drafts: list[int]
) -> None:
    assert found(backend, tokens, 4) == drafts
    assert found(backend, tokens, 0) == []


def test_given_a_match_beyond_the_longest_that_counts_when_looked_up_then_the_last_place_wins() -> None:
    stem = list(range(10, 10 + MAX_MATCH + 2))
    tokens = [5, *stem, 1, 6, *stem[2:], 2, 5, *stem]
    assert found(CpuBackend(), tokens, 1) == found(ReferenceBackend(), tokens, 1) == [2]
    assert MIN_MATCH < MAX_MATCH


@settings(max_examples=300, deadline=None)
@given(data=st.data(), variety=st.sampled_from([1, 2, 3, 40]), rows=st.integers(1, 5))
def test_given_any_texts_when_looked_up_then_both_find_the_same(data: st.DataObject, variety: int, rows: int) -> None:
    def column(low: int, high: int) -> npt.NDArray[np.int64]:
        return np.array(data.draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)))

    seed = data.draw(st.integers(0, 2**32 - 1))
    table = np.random.default_rng(seed).integers(0, variety, (rows, LENGTH)).astype(np.int32)
    order, num_tokens, most = np.random.default_rng(seed).permutation(rows), column(1, 48), column(0, 15)
    other = table.copy()
    counts = CpuBackend().find_drafts(table, order, num_tokens, most)
    assert (counts == ReferenceBackend().find_drafts(other, order, num_tokens, most)).all()
    assert (table == other).all()
