"""The plain tokens of a step, less those that are told otherwise."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.protocol.columns import column
from novainfer.scheduler.batch import PlainTokens

pytestmark = [pytest.mark.unit, pytest.mark.stage1]


@given(
    count=st.integers(1, 12),
    begun=st.sets(st.integers(0, 11)),
    places=st.sets(st.integers(0, 11)),
)
def test_given_places_when_taken_out_then_the_others_are_left_and_the_columns_are_as_they_were(
    count: int, begun: set[int], places: set[int]
) -> None:
    def make() -> PlainTokens:
        names = cast(list[Any], [f"sequence {i}" for i in range(count)])
        columns = [column(range(start, start + count)) for start in (100, 200, 300)]
        return PlainTokens(names, *columns, base=7, begun=sorted(place for place in begun if place < count))

    tokens = make()
    out = {place for place in places if place < count}
    assert tokens.without(out) == tokens.at([place for place in range(count) if place not in out]) or not out
    assert tokens.without(set()) is tokens
    assert tokens == make()
