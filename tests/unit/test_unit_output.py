"""One choice: tokens to text, stops, log-probabilities; whatever the messages are cut into."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schemas import ChatRequest
from gateway.told_parts import telling_of
from novainfer.client.output import ChoiceDelta, ChoiceOutput, describe_prompt
from novainfer.protocol.messages import Logprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.call_object import CallDelta, join_calls
from novainfer.text.model_parsers import begins_inside
from novainfer.text.parts import DROPPED, KEPT, TOLD, Parsers, Telling
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_thinker, write_tokenizer
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


THOUGHT_AND_CALL = (
    '<think>\nHm 你好\n</think>\n\nLook. <tool_call>{"name": "f", "arguments": {"x": "🎉 x"}}</tool_call>'
)
TELLING = Telling("hermes", "think")


@pytest.fixture(scope="module", params=[False, True], ids=["plain marks", "special marks"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_thinker(tmp_path_factory.mktemp("model"), are_special=request.param))


@settings(deadline=None)
@given(data=st.data())
def test_given_calls_and_reasoning_when_pushed_in_any_cut_then_they_are_told_apart_and_alike(
    thinker: Tokenizer, data: st.DataObject
) -> None:
    stop = data.draw(st.sampled_from([(), ("zzz",), ("Look. x",), ("x",), ('"}',), ("</think>",), ("<tool_call>",)]))
    params = SamplingParams(stop=stop, logprobs=data.draw(st.sampled_from([None, 0])))
    ids = thinker.encode(THOUGHT_AND_CALL)

    def pushed(cuts: list[int], telling: Telling | None = TELLING) -> tuple[ChoiceDelta, ChoiceOutput]:
        output, sum_, start = ChoiceOutput(thinker, params, telling=telling), ChoiceDelta(0), 0
        for end in [*sorted(set(cuts)), len(ids)]:
            part, last = ids[start:end], end == len(ids)
            entries = [] if params.logprobs is None else [Logprobs(token_id, -1.0, 1) for token_id in part]
            delta = output.push(TokenOutput("r", 0, start, part, "stop" if last else None, logprobs=entries))
            sum_.text += delta.text
            sum_.reasoning += delta.reasoning
            sum_.calls += delta.calls
            sum_.logprobs += delta.logprobs
            sum_.finish_reason = delta.finish_reason or sum_.finish_reason
            start = end
        sum_.calls = join_calls(sum_.calls)
        return sum_, output

    cuts = data.draw(st.lists(st.integers(1, len(ids) - 1), max_size=6))
    (found, output), (expected, one) = pushed(cuts), pushed([])
    assert found == expected
    counts = output.num_tokens, output.num_reasoning_tokens, output.finish_reason, output.ended_here
    assert counts == (one.num_tokens, one.num_reasoning_tokens, one.finish_reason, one.ended_here)
    plain, raw = pushed([], None)
    assert (output.num_tokens, output.finish_reason) == (raw.num_tokens, raw.finish_reason)
    assert found.logprobs == plain.logprobs
    if stop in ((), ("zzz",), ("Look. x",)):
        calls = [CallDelta(0, "f", '{"x": "🎉 x"}')]
        assert (found.text, found.reasoning, found.calls, found.finish_reason) == (
            "Look.", "Hm 你好", calls, "tool_calls"
        )  # fmt: skip


def test_given_a_parser_that_is_done_when_special_tokens_come_then_they_are_no_text(tmp_path: Path) -> None:
    thinker = Tokenizer.load(write_thinker(tmp_path, are_special=True))
    output = ChoiceOutput(thinker, SamplingParams(), telling=Telling(reasoning="think"))
    told = [output.push(TokenOutput("r", 0, place, [token_id])) for place, token_id in enumerate(
        thinker.encode("<think>Hm.</think>\nYes.<think> No</think><|im_start|>")
    )]  # fmt: skip
    assert output.is_plain
    assert ("".join(delta.text for delta in told), "".join(delta.reasoning for delta in told)) == ("Yes. No", "Hm.")


CALL = '<tool_call>{"name": "f", "arguments": {"x": "END y"}}</tool_call>'


def whole(tokenizer: Tokenizer, text: str, telling: Telling | None, *stop: str) -> tuple[ChoiceDelta, ChoiceOutput]:
    output = ChoiceOutput(tokenizer, SamplingParams(stop=stop), telling=telling)
    return output.push(TokenOutput("r", 0, 0, tokenizer.encode(text), "stop")), output


@pytest.mark.parametrize(
    "text",
    [
        "</think>hello",
        "</think>\n\nhello",
        "<think></think></think>hello",
        "<thi<think>hello",
        "hello</think>",
        "</think>",
    ],
)
def test_given_special_marks_that_mean_nothing_where_they_stand_when_told_then_they_are_no_text(
    tmp_path: Path, text: str
) -> None:
    thinker = Tokenizer.load(write_thinker(tmp_path, are_special=True))
    for calls in ("none", "hermes"):
        assert whole(thinker, text, Telling(calls, "think"))[0].text == whole(thinker, text, None)[0].text


def test_given_an_end_within_a_calls_arguments_when_told_then_the_engines_reason_stays(thinker: Tokenizer) -> None:
    telling = Telling("hermes", "think")
    for text, stop, reason in (
        (CALL, (), "tool_calls"),
        (CALL, ("END",), "stop"),
        (CALL[:50], (), "stop"),
        (CALL[:-13], (), "tool_calls"),
        (CALL[:-12], (), "tool_calls"),
        (CALL + CALL, (), "tool_calls"),
        (CALL + CALL[:50], (), "stop"),
    ):
        delta, output = whole(thinker, text, telling, *stop)
        assert (delta.finish_reason, output.finish_reason) == (reason, "stop"), text
        assert delta.calls
    first_alone = telling._replace(is_parallel=False)
    assert whole(thinker, CALL + CALL[:50], first_alone)[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("calls", ["none", "hermes"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_given_reasoning_that_is_kept_in_the_content_when_counted_then_there_is_none(
    thinker: Tokenizer, calls: str, is_inside: bool
) -> None:
    for thoughts, has_some in ((KEPT, False), (TOLD, True), (DROPPED, True)):
        telling = Telling(calls, "think", thoughts, is_inside=is_inside)
        _, output = whole(thinker, f"{'' if is_inside else '<think>'}Hm.</think>\nhello", telling)
        assert bool(output.num_reasoning_tokens) == has_some


def test_given_a_message_that_is_continued_when_its_last_thought_is_open_then_the_answer_begins_inside(
    thinker: Tokenizer,
) -> None:
    for end, is_within, is_continued_within in (
        ("<think>\n", True, True),
        ("<think>\nHm, " + "so " * 30, False, True),
        ("<think>Hm.</think> Yes", False, False),
        ("<think>Hm.</think><think>And", False, True),
        ("hello", False, False),
    ):
        ids = thinker.encode(end)
        assert begins_inside("think", thinker, ids, is_continued=False) == is_within
        assert begins_inside("think", thinker, ids, is_continued=True) == is_continued_within
        assert not begins_inside("none", thinker, ids, is_continued=True)
        for is_continued, expected in ((False, is_within), (True, is_continued_within)):
            request = ChatRequest(messages=[{"role": "assistant", "content": "x"}], continue_final_message=is_continued)
            telling = telling_of(request, Parsers("none", "think"), thinker, ids)
            assert telling is not None
            assert telling.is_inside == expected


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
