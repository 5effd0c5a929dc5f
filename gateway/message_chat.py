"""A request of `/v1/messages` as the chat that says the same, and one that only counts its prompt.

What is refused on the way is told in the words of the request that came: see `Words`.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from typing import Any

from gateway.message_schemas import ConversationRequest, CountTokensRequest, MessagesRequest
from gateway.message_turns import SYSTEM, Turns
from gateway.schemas import ChatRequest, GenerationRequest, TokenizeRequest, parse
from novainfer.errors import InvalidRequestError

MAX_EFFORT = 64  # characters
MODES = ("enabled", "disabled")
LEFT_TO_IT = ("adaptive", "auto")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KEPT_THOUGHTS = "clear_thinking_20251015"  # the one edit of a context that may ask for nothing
_SAME = frozenset(GenerationRequest.model_fields) | {"max_tokens", "chat_template_kwargs"}
_NAMES = {  # of the chat's fields, as errors name them
    "continue_final_message": "messages",
    "prompt": "messages",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
_WORDS = (
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"\bcontinue_final_message\b"), "messages"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^tools: (references in )?parameters\b"), r"tools: \1input_schema"),
)
_NUMBERED = re.compile(r"^messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Words:
    """places: see `Turns`."""

    places: array[int]

    def of(self, error: InvalidRequestError) -> InvalidRequestError:
        """An error about the chat, told of the request that it came from."""
        message, param = error.message, error.param
        numbered = _NUMBERED.match(message)
        if numbered is not None and int(numbered[1]) < len(self.places):
            place = self.places[int(numbered[1])]
            where = "system" if place == SYSTEM else f"messages[{place}]"
            message = where + message[numbered.end() :]
        for pattern, words in _WORDS:
            message = pattern.sub(words, message)
        return InvalidRequestError(message, param=_NAMES.get(param or "", param), code=error.code)


def as_chat(request: MessagesRequest) -> tuple[ChatRequest, Words]:
    """The chat. Raises `InvalidRequestError`."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in request.model_fields_set & _SAME}
    if request.stop_sequences is not None:
        if request.stop and request.stop != request.stop_sequences:
            words = "stop is another name of stop_sequences, which is there and says otherwise."
            raise InvalidRequestError(words, param="stop")
        fields["stop"] = request.stop_sequences
    prompt, words_of = _prompt_of(request)
    fields |= prompt
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    user = (request.metadata or {}).get("user_id")
    if not isinstance(user, str | None):
        raise InvalidRequestError("metadata.user_id must be a string.", param="metadata")
    if user is not None:
        fields.setdefault("user", user)
    form = _format(request)
    if form is not None:
        fields["response_format"] = form
    try:
        return parse(ChatRequest, fields, strict_params=False)[0], words_of
    except InvalidRequestError as error:
        raise words_of.of(error) from None


def as_prompt(request: CountTokensRequest) -> tuple[TokenizeRequest, Words]:
    """What is the chat's prompt. Raises `InvalidRequestError`."""
    _format(request)
    fields, words = _prompt_of(request)
    fields["chat_template_kwargs"] = request.chat_template_kwargs
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    try:
        return parse(TokenizeRequest, fields, strict_params=False)[0], words
    except InvalidRequestError as error:
        raise words.of(error) from None


def _prompt_of(request: ConversationRequest) -> tuple[dict[str, Any], Words]:
    """Fields of a chat, and the words for errors about them."""
    _check_context(request.context_management)
    turns = Turns(request.system, request.messages)
    fields: dict[str, Any] = {"messages": turns.messages}
    if turns.is_continued:
        last = turns.messages[-1]
        if "tool_calls" in last:
            words = "messages: the last one is the beginning of the answer where it is an assistant's: it must be text."
            raise InvalidRequestError(words, param="messages")
        fields["continue_final_message"] = True
    if request.tools:
        fields["tools"] = [_tool(tool, number) for number, tool in enumerate(request.tools)]
    if request.thinking is not None:
        fields |= _thinking(request.thinking)
    effort = (request.output_config or {}).get("effort")
    if not isinstance(effort, str | None) or len(effort or "") > MAX_EFFORT:
        words = f"output_config.effort must be a text of at most {MAX_EFFORT} characters."
        raise InvalidRequestError(words, param="output_config")
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields, Words(turns.places)


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    description = tool.get("description")
    if kind not in (None, "custom"):
        words = f"tools[{number}].type must be 'custom': this server has no tools of its own, nor their descriptions."
        raise InvalidRequestError(words, param="tools")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"tools[{number}].name must be a text.", param="tools")
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"tools[{number}].input_schema must be an object.", param="tools")
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"tools[{number}].description must be a string.", param="tools")
    about = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **about, "parameters": schema}}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind, name, alone = choice.get("type"), choice.get("name"), choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        words = "tool_choice.disable_parallel_tool_use must be true or false."
        raise InvalidRequestError(words, param="tool_choice")
    chosen: str | dict[str, Any]
    if kind == "tool" and isinstance(name, str):
        chosen = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        words = f"tool_choice.type must be one of {', '.join(CHOICES)} and tool, the last one with a name."
        raise InvalidRequestError(words, param="tool_choice")
    return {"tool_choice": chosen, "parallel_tool_calls": not alone}


def _thinking(thinking: dict[str, Any]) -> dict[str, Any]:
    """The template's switch. How much the model thinks is its own matter, so a budget has no effect."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if not isinstance(kind, str) or kind not in (*MODES, *LEFT_TO_IT):
        words = f"thinking.type must be one of {', '.join((*MODES, *LEFT_TO_IT))}."
        raise InvalidRequestError(words, param="thinking")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise InvalidRequestError("thinking.budget_tokens must be a whole number from 1 on.", param="thinking")
    return {} if kind in LEFT_TO_IT else {"thinking": {"type": kind}}


def _format(request: ConversationRequest) -> dict[str, Any] | None:
    given, param = (request.output_config or {}).get("format"), "output_config.format"
    if given is None:
        given, param = request.output_format, "output_format"
    elif request.output_format is not None:
        words = "output_format cannot be combined with output_config.format."
        raise InvalidRequestError(words, param="output_format")
    if given is None:
        return None
    name = param.partition(".")[0]
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(schema, dict):
        words = f"{param} must have the type json_schema, and an object for its schema."
        raise InvalidRequestError(words, param=name)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _check_context(given: dict[str, Any] | None) -> None:
    """To leave something out of a conversation would make another prompt."""
    edits = (given or {}).get("edits")
    for edit in [] if edits is None else edits if isinstance(edits, list) else [None]:
        is_idle = isinstance(edit, dict) and (edit.get("type"), edit.get("keep")) == (KEPT_THOUGHTS, "all")
        if not is_idle:
            words = "context_management: the server leaves nothing out of a conversation: edits must be empty."
            raise InvalidRequestError(words, param="context_management")
