"""`/v1/responses` of a real server, through OpenAI's SDK: the same answers as its chats, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

QUESTION = "Give me JSON with name Anna and age 31."
SAMPLED: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 7}}
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


class Person(pydantic.BaseModel):
    """What is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")
    adult: bool
    kind: str = pydantic.Field(max_length=8)


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


@pytest.mark.parametrize("most", [5, 40])
def test_given_a_seed_when_asked_then_the_answer_is_the_chats_whole_and_streamed(sdk: openai.OpenAI, most: int) -> None:
    whole = sdk.responses.create(model="demo", input=QUESTION, max_output_tokens=most, **SAMPLED)
    chat = sdk.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], max_tokens=most, **SAMPLED
    )
    assert whole.output_text == chat.choices[0].message.content != ""
    cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert (whole.incomplete_details is not None) == cut
    assert cut or most > 5
    assert whole.usage is not None
    assert chat.usage is not None
    counts = (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens)
    assert counts == (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens)
    events = list(sdk.responses.create(model="demo", input=QUESTION, max_output_tokens=most, stream=True, **SAMPLED))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert (last.response.output_text, last.response.status) == (whole.output_text, whole.status)


def test_given_a_type_when_parsed_then_the_answer_is_one_whole_and_streamed(sdk: openai.OpenAI) -> None:
    parsed = sdk.responses.parse(model="demo", input=QUESTION, text_format=Person, **SAMPLED)
    assert isinstance(parsed.output_parsed, Person)
    with sdk.responses.stream(model="demo", input=QUESTION, text_format=Person, **SAMPLED) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_given_a_tool_that_must_be_called_when_asked_then_its_call_is_an_item_and_may_be_answered(
    sdk: openai.OpenAI,
) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    options: dict[str, Any] = {"model": "demo", "tools": [tool], "tool_choice": "required", **SAMPLED}
    options["parallel_tool_calls"] = False
    whole = sdk.responses.create(input="How is Rome?", **options)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, [*json.loads(call.arguments)]) == ("weather", ["city"])
    with sdk.responses.stream(input="How is Rome?", **options) as stream:
        for _ in stream:
            pass
        (again,) = stream.get_final_response().output
    assert again.type == "function_call"
    assert again.arguments == call.arguments
    items: list[Any] = [{"role": "user", "content": "How is Rome?"}, call.to_dict()]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "warm"})
    answer = sdk.responses.create(model="demo", input=items, max_output_tokens=4, **SAMPLED)
    function = {"name": call.name, "arguments": call.arguments}
    called = {"id": call.call_id, "type": "function", "function": function}
    messages: list[Any] = [{"role": "user", "content": "How is Rome?"}, {"role": "assistant", "tool_calls": [called]}]
    messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "warm"})
    chat = sdk.chat.completions.create(model="demo", messages=messages, max_tokens=4, **SAMPLED)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    counts = (answer.usage.input_tokens, answer.usage.output_tokens)
    assert counts == (chat.usage.prompt_tokens, chat.usage.completion_tokens)


def test_given_log_probabilities_asked_for_when_answered_then_each_token_has_one(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(
        model="demo", input=QUESTION, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert [len(entry.top_logprobs) for entry in part.logprobs or []] == [2] * 4


def test_given_what_is_no_part_of_it_when_asked_then_the_sdk_raises_what_says_so(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
        sdk.responses.create(model="demo", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve("resp_1")
