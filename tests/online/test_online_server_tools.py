"""Calls of the demo model, from a real server and through the real SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
]


def test_given_a_question_that_a_tool_answers_when_asked_by_the_sdk_then_it_is_called_and_its_result_is_told(
    server: RunningServer,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with server.sdk() as sdk:
        request: Any = {"model": "demo", "tools": TOOLS, "temperature": 0}
        whole = sdk.chat.completions.create(messages=messages, **request).choices[0]
        with sdk.chat.completions.stream(messages=messages, **request) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert whole.finish_reason == streamed.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert whole.message.tool_calls is not None
        assert streamed.message.tool_calls is not None
        (call,), (same,) = whole.message.tool_calls, streamed.message.tool_calls
        assert call.type == same.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert same.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "rain"}'}
        turn = [*messages, whole.message.model_dump(exclude_unset=True), result]
        answer = sdk.chat.completions.create(messages=turn, **request).choices[0]
        assert answer.finish_reason == "stop"
        assert "rain" in (answer.message.content or "")
