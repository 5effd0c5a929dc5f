"""The ring of the newest results, against a list for each row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.protocol.columns import column
from novainfer.scheduler.newest import NewestTokens

pytestmark = pytest.mark.stage0

NUM_ROWS = 5


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_given_results_whose_rows_come_and_go_when_asked_then_a_row_has_what_it_got(data: st.DataObject) -> None:
    num_steps, step = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 20))
    newest = NewestTokens(num_steps, NUM_ROWS)
    rows, got = column(), dict[int, list[int]]()  # by row: what it got since it came, or since results were left out
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["same"] * 4 + ["others", "gap"]))
        if what == "gap":
            step, got = step + data.draw(st.integers(1, 9)), {}
        elif what == "others" or not rows:
            rows = column(data.draw(st.permutations(range(NUM_ROWS)))[: data.draw(st.integers(1, NUM_ROWS))])
        if not rows:
            continue
        tokens = [100 * step + row for row in rows]
        newest.put(step, rows, column(tokens))
        got = {row: [*got.get(row, ()), token] for row, token in zip(rows, tokens, strict=True)}
        for row, mine in got.items():
            count = data.draw(st.integers(1, min(len(mine), num_steps)))
            assert newest.of_row(row, step - count + 1).tolist() == mine[-count:]
        step += 1
