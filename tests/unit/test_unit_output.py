"""One choice: tokens to text, stops, log-probabilities; whatever the messages are cut into."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.client.output import ChoiceOutput, describe_prompt
from novainfer.protocol.messages import Logprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer
from tests.unit.test_unit_detokenizer import tokenizer_of

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

TEXT = "hello world 你好 🎉 the quick brown fox"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model")))


def run(tokenizer: Tokenizer, params: SamplingParams, ids: list[int], cuts: list[int]) -> tuple[str, ChoiceOutput]:
    output, text, start = ChoiceOutput(tokenizer, params), "", 0
    for end in [*sorted(set(cuts)), len(ids)]:
        last = end == len(ids)
        delta = output.push(TokenOutput("r", 0, start, ids[start:end], "length" if last else None))
        text += delta.text
        start = end
    return text, output


@settings(deadline=None)
@given(data=st.data())
def test_given_any_cut_when_pushed_then_text_stop_and_count_are_the_same(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte_level")
    params = SamplingParams(stop=("brown", "好 🎉x"))
    ids = tokenizer.encode(TEXT)
    cuts = data.draw(st.lists(st.integers(1, len(ids) - 1), max_size=6))
    text, output = run(tokenizer, params, ids, cuts)
    assert text == TEXT.split("brown")[0]
    assert (output.finish_reason, output.ended_here) == ("stop", True)
    assert tokenizer.decode(ids[: output.num_tokens]).endswith("brown")


def test_given_stop_inside_min_tokens_when_pushed_then_it_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello hello hello")
    text, output = run(tokenizer, SamplingParams(stop=("hello",), min_tokens=1), ids, [])
    assert text == "hello "
    assert output.finish_reason == "stop"


def test_given_a_stop_token_when_it_ends_the_choice_then_it_is_no_text_unless_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    for include, expected in ((False, tokenizer.decode(ids[:-1])), (True, "hello world")):
        params = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
        output = ChoiceOutput(tokenizer, params)
        delta = output.push(TokenOutput("r", 0, 0, ids, "stop", stop_token_id=ids[-1]))
        assert delta.text == expected
        assert (delta.stop_reason, output.num_tokens, output.ended_here) == (ids[-1], len(ids), False)


def test_given_the_end_token_when_special_tokens_are_shown_then_it_is_still_no_text(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    output = ChoiceOutput(tokenizer, SamplingParams(skip_special_tokens=False))
    delta = output.push(TokenOutput("r", 0, 0, [*tokenizer.encode("hi"), eos], "stop", stop_token_id=eos))
    assert (delta.text, delta.stop_reason) == ("hi", None)


def test_given_text_held_back_when_the_choice_ends_then_it_is_released(tokenizer: Tokenizer) -> None:
    output = ChoiceOutput(tokenizer, SamplingParams(stop=("hello!",)))
    assert output.push(TokenOutput("r", 0, 0, tokenizer.encode("hello"))).text == ""
    assert output.push(TokenOutput("r", 0, 1, [], "length")).text == "hello"


def test_given_logprobs_when_pushed_then_offsets_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab 🎉c")
    entries = [Logprobs(token_id, -1.0, 1) for token_id in ids]
    output = ChoiceOutput(tokenizer, SamplingParams(logprobs=0), text_offset=10)
    delta = output.push(TokenOutput("r", 0, 0, ids, "length", logprobs=entries))
    assert [entry.token.token_id for entry in delta.logprobs] == ids
    assert b"".join(entry.token.data for entry in delta.logprobs) == "ab 🎉c".encode()
    offsets = [entry.text_offset for entry in delta.logprobs]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1]) == (10, 10 + len("ab 🎉"))


def test_given_prompt_entries_when_described_then_the_first_token_has_none(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    described = describe_prompt(tokenizer, ids, [Logprobs(token_id, -1.0, 1) for token_id in ids[1:]])
    assert described[0] is None
    assert [entry.token.token_id for entry in described[1:] if entry] == ids[1:]


def test_given_a_finished_choice_when_more_tokens_come_then_they_are_ignored(tokenizer: Tokenizer) -> None:
    output = ChoiceOutput(tokenizer, SamplingParams())
    output.push(TokenOutput("r", 0, 0, tokenizer.encode("hello"), "length"))
    late = output.push(TokenOutput("r", 0, 1, tokenizer.encode("hello")))
    assert (late.text, late.token_ids, late.finish_reason) == ("", [], None)
