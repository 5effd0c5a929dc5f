"""What a person at a terminal sees of a stream."""

from __future__ import annotations

import pytest

from novainfer.entrypoints.talk import _contents

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


def test_given_a_stream_with_reasoning_when_printed_then_that_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "H"},
        {"content": None, "reasoning_content": "m."},
        {"content": "4"},
        {"content": "2"},
        {},
    ]
    assert "".join(_contents(deltas)) == "42"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Hm.\n\n")
    assert "".join(_contents([{"content": "4"}, {}])) == "4"
    assert capsys.readouterr().err == ""
