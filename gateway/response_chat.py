"""A request of `/v1/responses` as the chat that says the same.

What is refused on the way is told in the words of the request that came: see `Echo.in_words`.
"""

from __future__ import annotations

from typing import Any

from gateway.asked_grammar import SCHEMA_FIELDS
from gateway.nested import SWITCHES
from gateway.response_echo import Echo, echo_of
from gateway.response_items import messages_of
from gateway.schemas import ChatRequest, GenerationRequest, ResponseRequest, parse
from novainfer.errors import InvalidRequestError
from novainfer.sampling.params import INT_BOUNDS

LOGPROBS = "message.output_text.logprobs"  # of `include`
# What asks for nothing: a thought is told as it is.
ENCRYPTED = "reasoning.encrypted_content"
STREAM_OPTIONS = frozenset({"include_event_ids", "continuous_usage_stats"})
MAX_EFFORT = 64  # characters
SUMMARIES = ("auto", "concise", "detailed")
_SAME = frozenset(GenerationRequest.model_fields) | {
    *("top_logprobs", "parallel_tool_calls", "documents", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "include_reasoning", "separate_reasoning", "modalities"),
}


def as_chat(request: ResponseRequest) -> tuple[ChatRequest, Echo]:
    """The chat, and what its answer repeats of the request. Raises `InvalidRequestError`."""
    _refuse_unsupported(request)
    found = messages_of(request.input, request.instructions)
    fields: dict[str, Any] = {name: getattr(request, name) for name in request.model_fields_set & _SAME}
    fields["messages"] = found.messages
    fields["logprobs"] = LOGPROBS in request.include
    if request.top_logprobs and not fields["logprobs"]:
        low, high = INT_BOUNDS["logprobs"]
        words = f"top_logprobs must be between {low} and {high}."
        if low <= request.top_logprobs <= high:
            words = f"top_logprobs needs include to hold {LOGPROBS}."
        raise InvalidRequestError(words, param="top_logprobs")
    if request.max_output_tokens is not None:
        fields["max_tokens"] = request.max_output_tokens
    if request.tools:
        fields["tools"] = [_tool(tool, number) for number, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text is not None:
        fields["response_format"] = _format(request.text)
    if request.reasoning is not None:
        fields["reasoning_effort"] = _effort(request.reasoning)
    echo = Echo(echo_of(request), found.places)
    try:
        return parse(ChatRequest, fields, strict_params=False)[0], echo
    except InvalidRequestError as error:
        raise echo.in_words(error) from None


def _refuse_unsupported(request: ResponseRequest) -> None:
    """What would change the answer, and nothing here does."""
    for name, value, known in (
        ("background", request.background, (False,)),
        ("truncation", request.truncation, ("disabled",)),
        *(("include", item, (LOGPROBS, ENCRYPTED)) for item in request.include),
    ):
        if value is not None and value not in known:
            raise InvalidRequestError(f"Only {name} {' and '.join(map(_quoted, known))} can be asked for.", param=name)
    for name, value in (request.stream_options or {}).items():
        if value is not False and name in STREAM_OPTIONS:
            words = f"stream_options.{name} is not supported: it must be false."
            raise InvalidRequestError(words, param="stream_options")


def _quoted(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A chat's: the same fields in the same order, as the template shows them."""
    kind, name = tool.get("type"), tool.get("name")
    if kind != "function":
        words = f"tools[{number}].type must be 'function': this server has no tools of its own."
        raise InvalidRequestError(words, param="tools")
    if not isinstance(name, str) or not name:
        words = f"tools[{number}].name must be a text: a function's fields stand beside its type here."
        raise InvalidRequestError(words, param="tools")
    return {
        "type": "function",
        "function": {
            key: value
            for key, value in tool.items()
            if key != "type" and value is not None and not (value is False and key in SWITCHES)
        },
    }


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        words = "tool_choice must be 'auto', 'none', 'required' or an object with the type 'function' and a name."
        raise InvalidRequestError(words, param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _format(text: dict[str, Any]) -> dict[str, Any] | None:
    given = text.get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequestError("text.format must be an object.", param="text")
    kind = given.get("type")
    if kind != "json_schema":
        return {name: given[name] for name in ("type", *SCHEMA_FIELDS) if name in given}
    return {"type": kind, kind: {key: value for key, value in given.items() if key != "type"}}


def _effort(reasoning: dict[str, Any]) -> str | None:
    """For the template. Thoughts are told whole; nobody sums them up."""
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, *SUMMARIES):
            words = f"reasoning.{name} must be one of {', '.join(SUMMARIES)}."
            raise InvalidRequestError(words, param="reasoning")
    effort = reasoning.get("effort")
    if not isinstance(effort, str | None) or len(effort or "") > MAX_EFFORT:
        words = f"reasoning.effort must be a text of at most {MAX_EFFORT} characters."
        raise InvalidRequestError(words, param="reasoning")
    return effort
