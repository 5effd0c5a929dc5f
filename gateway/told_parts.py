"""How a chat's answer tells content, reasoning and calls: what of them a request asks for, and their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.schemas import ChatRequest
from gateway.slices import to_json
from gateway.sse import json_string
from gateway.stream_record import StreamRecord
from novainfer.client.output import ChoiceDelta
from novainfer.text.call_object import CallDelta, join_calls
from novainfer.text.model_parsers import begins_inside
from novainfer.text.parts import DROPPED, KEPT, NONE, TOLD, Parsers, Telling
from novainfer.text.tokenizer import Tokenizer


def telling_of(
    request: ChatRequest,
    parsers: Parsers,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    *,
    calls_lead: bool = False,
) -> Telling | None:
    """What is taken out of the text of an answer; None: nothing. Calls are looked for only where there are tools.

    calls_lead: and only at its beginning, as in what has another form a mark means nothing.
    """
    calls = parsers.calls if request.tools and request.tool_choice != "none" else NONE
    thoughts = TOLD if request.separate_reasoning else KEPT
    telling = Telling(
        calls,
        parsers.reasoning,
        thoughts if request.include_reasoning else DROPPED,
        is_parallel=request.parallel_tool_calls,
        calls_lead=calls_lead and calls != NONE,
    )
    if telling.is_plain:
        return None
    is_continued = request.continue_final_message
    is_inside = begins_inside(telling.reasoning, tokenizer, prompt_token_ids, is_continued=is_continued)
    return telling._replace(is_inside=is_inside)


def message_of(whole: ChoiceDelta, record: StreamRecord) -> dict[str, Any]:
    """`message` of a whole answer; without text beside its calls the content is null."""
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.text or None
        message["tool_calls"] = [
            {
                "id": record.call_id(whole.choice, call.index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in whole.calls
        ]
    return message


def deltas_of(delta: ChoiceDelta, record: StreamRecord) -> Iterator[str]:
    """`delta` of the chunks that tell what is new of a choice: JSON without the braces, of at least one.

    The beginning of a call stands before its arguments, in a chunk of its own but where events have ids: a place, and
    so a chunk, is all that a token adds.
    """
    calls = join_calls(delta.calls)
    begun = [call for call in calls if call.name is not None and call.arguments]
    if begun and not record.event_ids:
        names = [CallDelta(call.index, call.name, "") for call in begun]
        yield _fields(delta, [*(call for call in calls if call not in begun), *names], record)
        yield _calls(delta.choice, [CallDelta(call.index, None, call.arguments) for call in begun], record)
    else:
        yield _fields(delta, calls, record)


def _fields(delta: ChoiceDelta, calls: list[CallDelta], record: StreamRecord) -> str:
    fields = []
    if delta.reasoning:
        fields.append(f'"reasoning_content":{json_string(delta.reasoning)}')
    if delta.text or not (delta.reasoning or calls):
        fields.append(f'"content":{json_string(delta.text)}')
    if calls:
        fields.append(_calls(delta.choice, calls, record))
    return ",".join(fields)


def _calls(choice: int, calls: list[CallDelta], record: StreamRecord) -> str:
    return f'"tool_calls":[{",".join([_call(choice, call, record) for call in calls])}]'


def _call(choice: int, call: CallDelta, record: StreamRecord) -> str:
    arguments = f'"arguments":{json_string(call.arguments)}'
    if call.name is None:
        return f'{{"index":{call.index},"function":{{{arguments}}}}}'
    begins = to_json({"index": call.index, "id": record.call_id(choice, call.index), "type": "function"})
    return f'{begins[:-1]},"function":{{"name":{json_string(call.name)},{arguments}}}}}'
