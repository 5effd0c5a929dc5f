"""A stream that another gateway goes on with: wherever it was cut, what follows is what followed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers import ChatChunks, CompletionChunks, chunks_of
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.generation import Generation, PromptState
from gateway.metrics import GatewayMetrics
from gateway.stream_record import PromptRecord, StreamRecord, parse_event_id
from novainfer.client.journal import taken_over
from novainfer.client.output import ChoiceDelta
from novainfer.client.stream import RequestStream
from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import AddRequest, EngineInfo, Logprobs, PromptLogprobs, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.parts import DROPPED, Telling
from novainfer.text.tokenizer import Tokenizer
from novainfer.text.tool_calls import call_id
from tests.chaos.streams import events
from tests.fakes import write_tokenizer

pytestmark = pytest.mark.unit

RECORD = StreamRecord(
    is_chat=True, response_id="chatcmpl-1", created=1, model="m", include_usage=False, continuous_usage=False,
    event_ids=True, token_ids=False, logprobs=False, echo=False, receipt=False, after_prompt=False,
    prompt_alone=False,
)  # fmt: skip
Said = list[
    tuple[str, int, str, list[float | None], str | None]
]  # (event id, choice, text, log-probabilities, finish reason)


def say(
    tokenizer: Tokenizer,
    params: SamplingParams,
    outputs: list[TokenOutput],
    *,
    is_chat: bool,
    prompt_alone: bool,
    after: str = "",
    num_at_once: int = 1,
) -> Said:
    """What a gateway writes that gets these outputs, so many before it looks, and goes on after `after`."""
    stream = RequestStream(["r"], lambda *_: None)
    echo = "ab" if prompt_alone else ""
    told = parse_event_id(after, [params.max_tokens] * params.n)
    generation = Generation(
        [PromptState("r", [5, 6], params, [2], echo, told, is_alone=prompt_alone)],
        stream,
        tokenizer,
        GatewayMetrics("m", ClientView),
        engine=EngineInfo(1, True),
        info=RequestInfo("r"),
        after_prompt=not is_chat,
    )
    record = replace(RECORD, is_chat=is_chat, logprobs=params.logprobs is not None, echo=prompt_alone)
    chunks = chunks_of(generation, record, None)
    said: Said = []
    if prompt_alone and params.logprobs is not None:
        stream.push(PromptLogprobs("r", 1, [Logprobs(6, -6.5, 1)]))
    for first in range(0, len(outputs), num_at_once):
        for output in outputs[first : first + num_at_once]:
            stream.push(output)
        lines = b"".join(asyncio.run(write(chunks, delta)) for delta in generation.take()).decode()
        for event_id, data in events(iter(lines.split("\n"))):
            for choice in json.loads(data)["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                said.append((event_id, choice["index"], text, told_logprobs(choice), choice["finish_reason"]))
    return said


async def write(chunks: ChatChunks | CompletionChunks, delta: ChoiceDelta) -> bytes:
    await chunks.prepare(delta)
    return chunks(delta)


def told_logprobs(choice: dict[str, Any]) -> list[float | None]:
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]


def whole(said: Said, choice: int) -> tuple[str, list[float | None], list[str | None]]:
    mine = [event for event in said if event[1] == choice]
    logprobs = [logprob for *_, part, _ in mine for logprob in part]
    return "".join(text for _, _, text, _, _ in mine), logprobs, [reason for *_, reason in mine if reason]


def cut(
    token_ids: list[int],
    choice: int,
    sizes: list[int],
    *,
    late_end: bool,
    stops: bool,
    brought: list[int],
    logprobs: int | None,
) -> list[TokenOutput]:
    """The outputs of one choice, in messages of these sizes (the last one again and again).

    brought: its first tokens, that the claimed request has brought along, without log-probabilities.
    """
    outputs = [TokenOutput("r", choice, 0, brought)] if brought else []
    while (index := sum(len(output.token_ids) for output in outputs)) < len(token_ids):
        size = sizes[min(len(outputs), len(sizes) - 1)]
        part = token_ids[index : index + size]
        entries = [Logprobs(i, -i / 1000 - position, 1) for position, i in enumerate(part, index)]
        outputs.append(TokenOutput("r", choice, index, part, logprobs=[] if logprobs is None else entries))
    if stops:  # the stop token is its last one
        outputs[-1] = replace(outputs[-1], finish_reason="stop", stop_token_id=token_ids[-1])
    elif late_end:
        outputs.append(TokenOutput("r", choice, len(token_ids), [], "length"))
    else:
        outputs[-1] = replace(outputs[-1], finish_reason="length")
    return outputs


CHOICES = st.lists(st.lists(st.integers(3, 300), min_size=1, max_size=12), min_size=1, max_size=3)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(
    choices=CHOICES, sizes=SIZES, again=SIZES, is_chat=st.booleans(), late_end=st.booleans(), stops=st.booleans(),
    stop=st.sampled_from([(), ("e",), ("qu", "a b"), ("zzz",)]), logprobs=st.sampled_from([None, 0]),
    num_at_once=st.integers(1, 4), prompt_alone=st.booleans(),
)  # fmt: skip
def test_given_any_stream_when_cut_after_any_event_then_the_rest_makes_it_whole(
    tokenizer: Tokenizer,
    choices: list[list[int]],
    sizes: list[int],
    again: list[int],
    is_chat: bool,
    late_end: bool,
    stops: bool,
    stop: tuple[str, ...],
    logprobs: int | None,
    num_at_once: int,
    prompt_alone: bool,
) -> None:
    if prompt_alone:  # then the engine is asked for one token of each choice
        choices, is_chat = [ids[:1] for ids in choices], False
    most = 1 if prompt_alone else 99
    params = SamplingParams(n=len(choices), max_tokens=most, seed=1, stop=stop, stop_token_ids=(7,), logprobs=logprobs)
    # A token that ended its choice is sampled again.
    claimed = AddRequest("r", [5, 6], params, emitted=[ids[:-1] for ids in choices])

    def outputs(sizes: list[int], emitted: list[list[int]]) -> list[TokenOutput]:
        by_choice = [
            cut(ids, c, sizes, late_end=late_end and not stops, stops=stops, brought=emitted[c], logprobs=logprobs)
            for c, ids in enumerate(choices)
        ]
        return [part for c in range(max(map(len, by_choice))) for own in by_choice for part in own[c : c + 1]]

    first = say(tokenizer, params, outputs(sizes, [[] for _ in choices]), is_chat=is_chat, prompt_alone=prompt_alone)
    if prompt_alone:
        assert all(
            whole(first, choice) == ("ab", [] if logprobs is None else [None, -6.5], ["length"])
            for choice in range(len(choices))
        )
    for number, (event_id, *_) in enumerate(first):
        told = [max(place - 1, 0) for place in parse_event_id(event_id, [most] * len(choices))]
        later = outputs(again, taken_over(claimed, told).emitted)
        rest = say(
            tokenizer,
            params,
            later,
            is_chat=is_chat,
            prompt_alone=prompt_alone,
            after=event_id,
            num_at_once=num_at_once,
        )
        for choice in range(len(choices)):
            assert whole(first[: number + 1] + rest, choice) == whole(first, choice), event_id
        if rest:
            assert rest[-1][0] == first[-1][0]


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-2", "1.5", "1e3", "9" * 10, "٣"])
def test_given_what_is_no_event_id_of_one_choice_when_parsed_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_event_id(text, [10**12])


def test_given_a_record_when_written_and_read_then_it_is_the_same() -> None:
    record = PromptRecord(RECORD, 1, 2, "echo é")
    assert PromptRecord.from_json(record.to_json()) == record


def test_given_a_tokenizer_folder_when_made_then_it_has_characters_of_several_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "t"))
    assert any(tokenizer.token_bytes(i)[:1] >= b"\x80" for i in range(3, 300))


def test_given_a_record_of_a_chat_with_parsers_when_written_and_read_then_it_names_its_calls_alike() -> None:
    telling = Telling("mistral", "think", DROPPED, is_parallel=False, is_inside=True)
    record = PromptRecord(replace(RECORD, telling=telling), 0, 1, "")
    read = PromptRecord.from_json(record.to_json())
    assert read == record
    assert isinstance(read.stream.telling, Telling)
    assert read.stream.call_id(0, 1) == call_id("mistral", "chatcmpl-1", 0, 1)
