"""One table of every parameter, and the cases that follow from it.

A row says what its values may be and at which doors it can be sent; what must come of a case follows from its row
alone, never from the server's own code.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.safety.kinds import (
    MEGABYTE_TEXT,
    AnyNumber,
    Anything,
    Either,
    Flag,
    Kind,
    ListOf,
    MapOf,
    Nothing,
    Number,
    Object,
    Text,
    whole,
)

# The demo model's.
VOCAB = 640
CONTEXT = 2048
EOS = 633
MODEL = "demo"

ANY = "*"  # as a `param`
CHAT, TEXT, RESPONSES, TURNS, ENGINE = "chat", "text", "responses", "messages", "engine"
CHOICES = (CHAT, TEXT)  # with several answers to a request
TALKS = (CHAT, RESPONSES)
HTTP = (*CHOICES, RESPONSES, TURNS)
PROMPT_IDS = [11, 12, 13]
MESSAGES = [{"role": "user", "content": "Hello!"}]
CHAT_PROMPT_TOKENS = 12  # of those messages, rendered


class Outcome(enum.Enum):
    """What comes of a case. The last two are the codec's: what it cannot write, and what it drops when it reads."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNENCODABLE = "unencodable"
    DROPPED = "dropped"


class Missing(enum.Enum):
    """The one value of a field that is not sent."""

    MISSING = "missing"


@dataclass(frozen=True)
class Raw:
    """A number as it stands in the JSON text; too large for any type."""

    text: str


@dataclass(frozen=True)
class Expected:
    """`status`, `param` and `code` are of the error, where there is one."""

    outcome: Outcome
    status: int = 400
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Parameter:
    """A row. null: whether it may be null.   beside: what stands beside it.   refused: wrong though of the kind.

    param: the name in errors, where it is another.   status: of a value that has the type but is not allowed.
    means: the field that it is another name of, as which it is refused.
    """

    name: str
    kind: Kind
    doors: tuple[str, ...]
    null: bool = True
    required: bool = False
    beside: dict[str, Any] = field(default_factory=dict)
    refused: tuple[Any, ...] = ()
    extra: tuple[Any, ...] = ()
    param: str = ""
    status: int = 400
    means: str = ""


@dataclass(frozen=True)
class Case:
    """One value of one parameter at one door."""

    number: int
    door: str
    row: Parameter
    value: Any
    expected: Expected

    @property
    def label(self) -> str:
        shown = repr(self.value)
        return f"{self.number} {self.door} {self.row.name}={shown if len(shown) < 60 else shown[:60] + '...'}"

    @property
    def is_heavy(self) -> bool:
        """Many sequences in one request: sent by itself, so that the queue has room for it."""
        return (self.row.name, self.door) == ("prompt", TEXT) and isinstance(self.value, list) and len(self.value) > 64


INT32, INT63, UINT64 = 2**31, 2**63, 2**64
COMMON = (
    True, False, "1", "", [], {}, [1], {"a": 1}, 0, 1.5, None, Missing.MISSING, INT32, -INT32, INT63, -INT63, UINT64,
    10**400, math.nan, math.inf, -math.inf, -0.0, 1e308, -1e308, 5e-324, Raw("1e400"), Raw("-1e400"), "\ud800",
)  # fmt: skip

TOKEN_ID = whole(0, VOCAB - 1)
IDS = ListOf(TOKEN_ID, 5, 0, 4096)
NOT_ALL_IDS = ListOf(TOKEN_ID, 5, 0, 4096, together=lambda ids: len(set(ids)) < VOCAB)
EVERY_ID = list(range(VOCAB))
STOP = ListOf(Text(1, 1024), "zz", 0, 16)
BIAS = Number(-100.0, 100.0)
NEARLY_ZERO = (0.0, 1e-3)  # greedy to a client; to an engine, a temperature that leaves float32
COUNT20 = whole(0, 20)
ENDS_AT_ONCE = {"allowed_token_ids": [EOS]}
ONE_TOKEN = ("x", "a", "\0", "1", "<|im_end|>")  # with a space before them or without
EMPTY = ("", [], {})
NOT_IN_CHAT: dict[str, tuple[Any, ...]] = {  # and what asks for nothing
    **dict.fromkeys(("echo", "functions", "audio"), EMPTY),
    "function_call": ("none", "auto"),
    "web_search_options": (),
}
NOT_IN_TEXT: dict[str, tuple[Any, ...]] = {
    "think": (*EMPTY, "low", "medium", "high"),
    "thinking": (*EMPTY, {"type": "disabled"}, {"type": "auto"}, {"type": "adaptive", "budget_tokens": None}),
    "suffix": ("",),
    "best_of": (1,),
}
NOT_IN_RESPONSES = (
    "max_new_tokens",
    "messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "prompt_logprobs", "return_token_ids",
    "return_tokens_as_token_ids", "receipt", "response_format", "reasoning_effort", "echo", "functions",
    "context_management", "prompt", "previous_response_id", "conversation", "explain",
)  # fmt: skip
NOT_IN_TURNS = (
    "add_generation_prompt", "container", "continue_final_message", "documents", "echo", "explain", "functions",
    "input", "logprobs", "max_completion_tokens", "max_new_tokens", "mcp_servers", "modalities", "n", "prompt",
    "prompt_logprobs", "reasoning_effort", "receipt", "response_format", "return_token_ids",
    "return_tokens_as_token_ids", "stream_options", "top_logprobs",
)  # fmt: skip
NOWHERE = (
    "chat_template", "logits_processors", "min_completion_tokens", "prompt_embeds",
    "truncate_prompt_tokens", "use_beam_search", "logprob_token_ids", "repetition_detection", "return_prompt_text",
    "return_token_offsets", "thinking_token_budget", "watermarking", "guided_json", "grammar", "json_schema",
    "regex", "ebnf", "structural_tag", "input_ids", "lora_path", "prompt_token_ids", "adapter_id",
    "custom_logit_processor", "lora_request", "return_hidden_states", "stop_regex",
)  # fmt: skip
ZEROS = (*EMPTY, 0, 0.0)
NEUTRAL_NUMBERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dynatemp_range", "mirostat", "mirostat_mode", "no_repeat_ngram_size"), ZEROS),
    **dict.fromkeys(("smoothing_factor", "top_a"), ZEROS),
    "length_penalty": (*EMPTY, 1, 1.0),
    "lora": (*EMPTY, [{"id": 0, "scale": 0}, {"scale": 0.0}]),
}
NEUTRAL_RANGES = {
    **dict.fromkeys(("dry_multiplier", "top_n_sigma", "truncate", "xtc_probability"), Number(-math.inf, 0.0)),
    **dict.fromkeys(("tfs", "tfs_z", "typical_p"), Number(1.0, math.inf)),
    "num_beams": Number(0.0, 1.0),
}
OURS = (
    "messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "eos_token", "raise_exception", "range",
)  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def is_bias_key(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and int(key) < VOCAB


def is_message(message: dict[str, Any]) -> bool:
    content, role = message.get("content"), message.get("role")
    if role not in ROLES or "tool_calls" in message:
        return False
    if not isinstance(message.get("tool_call_id"), str | None):
        return False
    if role == "assistant" and content in (None, []) and message.keys() & {"content", "refusal"}:
        content = message.get("refusal") or ""
    return isinstance(content, str) or (isinstance(content, list) and content != [] and all(map(is_part, content)))


def is_part(part: Any) -> bool:
    """Of a user's message."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def is_template_kwargs(given: dict[str, Any]) -> bool:
    names = all(re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,63}", name) and name not in OURS for name in given)
    return names and len(given) <= 16


THINKINGS: tuple[dict[str, Any], ...] = (
    {}, {"type": "enabled"}, {"type": "disabled", "budget_tokens": None}, {"type": "adaptive"}, {"type": None},
    {"type": []}, {"type": "enabled", "budget_tokens": 5}, {"budget_tokens": 5},
)  # fmt: skip


def is_thinking(value: dict[str, Any]) -> bool:
    return value in THINKINGS[1:4]


def is_stream_options(options: dict[str, Any]) -> bool:
    flags = (options.get("include_usage"), options.get("continuous_usage_stats"))
    return all(flag is None or isinstance(flag, bool) for flag in flags)


def is_tool(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"] != ""


def is_format(value: dict[str, Any]) -> bool:
    if value.get("type") != "json_schema":
        return value.get("type") in ("text", "json_object")
    return (value.get("json_schema") or {}) in (
        {"name": "n", "schema": {}},
        {"name": "n", "schema": {"type": "integer"}},
    )


RIGHT_OUTPUTS: tuple[dict[str, Any], ...] = (
    {"json": {}}, {"json": "{}"}, {"json": {"type": "integer"}}, {"regex": "a+"}, {"regex": "\0"}, {"choice": ["a"]},
    {"choice": [""]}, {"choice": ["a", "<|im_end|>"]}, {"grammar": 'start: "a"'}, {"grammar": "start: <|im_end|>"},
    {"json": None, "regex": "a"},
)  # fmt: skip
OUTPUTS: tuple[dict[str, Any], ...] = (
    {}, {"json": None}, *RIGHT_OUTPUTS, {"json": []}, {"json": 5}, {"json": "{"}, {"json": "[]"},
    {"json": {"a": math.nan}}, {"regex": ""}, {"regex": "("}, {"regex": "(?=a)"}, {"regex": "\ud800"}, {"regex": 5},
    {"choice": []}, {"choice": "a"}, {"choice": [5]}, {"grammar": ""}, {"grammar": "start: x"},
    {"grammar": "start: <|x|>"},
    {"grammar": "x" * 70_000}, {"regex": "a", "choice": ["a"]}, {"x": "y"}, {"whitespace_pattern": " "},
)  # fmt: skip


def is_outputs(value: dict[str, Any]) -> bool:
    return value in RIGHT_OUTPUTS


FUNCTIONS = (None, 5, "f", [], {}, {"name": None}, {"name": ""}, {"name": 5}, {"name": "f"}, {"name": "f", "x": [0.5]})
TOOL = Object(({}, {"name": "f"}, {"type": "x"}, *({"function": function} for function in FUNCTIONS)), is_tool)
ANY_OBJECT = Object(({}, {"a": None}, {"": []}, {"a": {"b": [0.5, 2**64, 10**400]}}))
RESUMED = ([[]], [[5]], [[5, 5]], [[], []], [[VOCAB]])
PLAIN = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
MESSAGE = Object(
    (
        *({"role": role, "content": "x"} for role in (*ROLES, "robot", "", "User", None, 5, ["user"])),
        *({"role": "user", "content": content} for content in (None, "", "\0", "\ud800", "<|im_end|>", 5, True)),
        *({"role": "user", "content": content} for content in ({}, [], PART)),
        *({"role": "user", "content": [part]} for part in (PART, {"text": "x"}, {"text": 5}, 5, None, "x")),
        *({"role": "tool", "content": "x", "tool_call_id": call} for call in ("call", "", None, 5)),
        *({"role": "assistant", "refusal": words} for words in ("x", None, 5)),
        {"content": "x"},
        *({"role": role} for role in ROLES),
        {"role": "user", "content": MEGABYTE_TEXT[: 2**16 - 1]},
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": "{"}}]},
    ),
    is_message,
)
TOO_LONG_CHATS = ([PLAIN] * 8191, [PLAIN] * 8192, [{"role": "user", "content": MEGABYTE_TEXT[: 2**16 - 1]}])
LOGPROBS = "message.output_text.logprobs"
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
GAVE = {"type": "function_call_output", "call_id": "c", "output": "x"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}


def is_item(item: dict[str, Any]) -> bool:
    """Of a response's input. A part of words is what it is in a chat."""
    kind, role, content = item.get("type"), item.get("role"), item.get("content")
    if kind == "function_call":
        return all(isinstance(item.get(key), str) for key in ("call_id", "name", "arguments"))
    if kind == "function_call_output":
        return isinstance(item.get("call_id"), str) and are_words(item.get("output"))
    if kind == "reasoning":
        return content is None or (isinstance(content, list) and all(part == THOUGHT["content"][0] for part in content))
    empty = role == "assistant" and content == []
    return kind in (None, "message") and role in ROLES[:4] and (empty or are_words(content))


def are_words(content: Any) -> bool:
    if isinstance(content, list) and content:
        return all(is_part(part) or part == {"type": "input_text", "text": "x"} for part in content)
    return isinstance(content, str)


def is_flat_tool(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function" and isinstance(tool.get("name"), str) and tool["name"] != ""


def is_text_format(text: dict[str, Any]) -> bool:
    given = text.get("format")
    if not isinstance(given, dict | None):
        return False
    if given is None or given.get("type") in ("text", "json_object"):
        return True
    return given in SCHEMA_FORMATS[:2]


def is_reasoning(value: dict[str, Any]) -> bool:
    effort = value.get("effort")
    is_effort = isinstance(effort, str | None) and len(effort or "") <= 64
    return is_effort and value.get("summary") in (None, "auto", "concise", "detailed")


def is_metadata(value: dict[str, Any]) -> bool:
    right = all(len(key) <= 64 and isinstance(text, str) and len(text) <= 512 for key, text in value.items())
    return right and len(value) <= 16


ITEM = Object(
    (
        PLAIN, {**PLAIN, "type": "message"}, {**PLAIN, "type": 5}, {**PLAIN, "type": "item_reference"}, {"type": "x"},
        CALLED, {**CALLED, "call_id": None}, {**CALLED, "name": 5}, {**CALLED, "arguments": {}},
        {**CALLED, "arguments": "{"}, GAVE, {**GAVE, "output": None},
        {**GAVE, "output": [{"type": "input_text", "text": "x"}]}, {**GAVE, "output": [5]}, {**GAVE, "call_id": 5},
        THOUGHT, {**THOUGHT, "content": None}, {**THOUGHT, "content": 5},
        {**THOUGHT, "content": [{"type": "reasoning_text"}]},
        *({"role": role, "content": "x"} for role in (*ROLES, "robot", None, 5, ["user"])),
        *({"role": "user", "content": content} for content in (None, "", "\0", "\ud800", 5, [], {}, [PART], [5], [{}])),
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "assistant", "content": []},
    ),
    is_item,
)  # fmt: skip
FLAT_TOOL = Object(
    ({}, {"name": "f"}, {"type": "function"}, {"type": "function", "name": ""}, {"type": "function", "name": 5},
     {"type": "web_search"}, {"type": "function", "function": {"name": "f"}},
     {"type": "function", "name": "f", "x": [0.5]}),
    is_flat_tool,
)  # fmt: skip
SCHEMA_FORMATS: tuple[dict[str, Any], ...] = tuple(
    {"type": "json_schema", "name": name, "schema": schema}
    for name, schema in (("n", {}), ("n", {"type": "integer"}), ("n", {"type": "x"}), ("n", []), ("", {}), (None, {}))
)
TEXTS: tuple[dict[str, Any], ...] = (
    {}, {"format": None}, {"format": 5}, {"format": {}}, {"format": {"type": "text"}},
    {"format": {"type": "json_object"}},
    {"format": {"type": []}}, {"format": {"type": "grammar"}}, {"verbosity": None}, {"verbosity": "low"}, {"x": 1},
    *({"format": given} for given in SCHEMA_FORMATS),
)  # fmt: skip
REASONINGS: tuple[dict[str, Any], ...] = (
    {}, {"effort": "low"}, {"effort": None}, {"effort": 5}, {"summary": "auto"}, {"summary": "detailed"},
    {"summary": "concise"}, {"summary": "long"}, {"effort": "x" * 64}, {"effort": "x" * 65},
    {"summary": []},
)  # fmt: skip
METADATA: tuple[dict[str, Any], ...] = (
    {}, {"a": "b"}, {"": ""}, {"a": 5}, {"a": None}, {"a" * 64: "b" * 512}, {"a" * 65: "b"}, {"a": "b" * 513},
    {str(number): "x" for number in range(16)}, {str(number): "x" for number in range(17)},
)  # fmt: skip
EVENT_IDS = {"include_event_ids": True}
STREAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"include_obfuscation": False}, {"include_obfuscation": True}, {"include_event_ids": False},
    {"x": 1}, EVENT_IDS,
)  # fmt: skip
WORDS = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
USER_BLOCKS: tuple[Any, ...] = (
    WORDS, {**WORDS, "cache_control": {}}, RESULT, {**RESULT, "content": None}, {**RESULT, "content": [WORDS]},
    {**RESULT, "is_error": True},
)  # fmt: skip
WRONG_BLOCKS: tuple[Any, ...] = (
    {"type": "text"}, {**WORDS, "text": 5}, {**RESULT, "tool_use_id": 5}, {**RESULT, "content": 5},
    {**RESULT, "content": [RESULT]}, {**RESULT, "is_error": 5}, {"type": "image"}, {"type": []}, {}, 5, None, USED,
)  # fmt: skip
TURN = Object(
    (
        *({"role": role, "content": "x"} for role in ("user", "system", "tool", None, 5, ["user"])),
        *({"role": "user", "content": content} for content in ("", "\0", "\ud800", None, 5, [], {}, "<|im_end|>")),
        *({"role": "user", "content": [block]} for block in (*USER_BLOCKS, *WRONG_BLOCKS)),
        {"content": "x"}, {"role": "user"},
    ),
    lambda turn: is_turn(turn),
)  # fmt: skip


def is_turn(turn: dict[str, Any]) -> bool:
    """Of a user: what goes on with an assistant's depends on the template."""
    content = turn.get("content")
    is_said = isinstance(content, str) or (
        isinstance(content, list) and content != [] and all(block in USER_BLOCKS for block in content)
    )
    return turn.get("role") == "user" and is_said


CUSTOM = {"name": "f", "input_schema": {}}
CUSTOM_TOOL = Object(
    (
        CUSTOM, {**CUSTOM, "type": "custom"}, {**CUSTOM, "type": "bash_20250124"}, {**CUSTOM, "type": 5}, {},
        {"name": "f"}, {"name": "f", "input_schema": []}, {**CUSTOM, "name": ""}, {**CUSTOM, "name": 5},
        {**CUSTOM, "description": "d"}, {**CUSTOM, "description": 5}, {**CUSTOM, "x": 1},
    ),
    lambda tool: tool.get("type") in (None, "custom") and is_custom(tool),
)  # fmt: skip


def is_custom(tool: dict[str, Any]) -> bool:
    name = isinstance(tool.get("name"), str) and tool["name"] != ""
    return name and isinstance(tool.get("input_schema"), dict) and isinstance(tool.get("description"), str | None)


CHOICE_ALONE = {"type": "auto", "disable_parallel_tool_use": True}
RIGHT_CHOICES: tuple[dict[str, Any], ...] = ({"type": "auto"}, {"type": "none"}, CHOICE_ALONE)
WRONG_CHOICES: tuple[dict[str, Any], ...] = (
    {}, {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "f"}, {"type": 5}, {"type": "required"},
    {"type": "auto", "disable_parallel_tool_use": 5},
)  # fmt: skip
RIGHT_THOUGHTS: tuple[dict[str, Any], ...] = (
    {"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1},
    {"type": "enabled", "budget_tokens": None}, {"type": "disabled", "x": 1},
)  # fmt: skip
WRONG_THOUGHTS: tuple[dict[str, Any], ...] = (
    {}, {"type": None}, {"type": []}, {"type": "on"}, {"budget_tokens": 5}, {"type": "enabled", "budget_tokens": 0},
    {"type": "enabled", "budget_tokens": "5"}, {"type": "enabled", "budget_tokens": 1.5},
)  # fmt: skip
OUTPUT_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema", "schema": {}}, {"type": "json_schema", "schema": {"type": "integer"}},
    {"type": "json_schema"}, {"type": "json_schema", "schema": []}, {"type": "text"}, {},
    {"type": "json_schema", "schema": {"type": "x"}},
)  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    {}, {"effort": "low"}, {"effort": None}, {"effort": 5}, {"effort": "x" * 64}, {"effort": "x" * 65},
    {"format": None}, {"format": 5}, *({"format": form} for form in OUTPUT_FORMATS),
)  # fmt: skip


def is_config(value: dict[str, Any]) -> bool:
    effort, form = value.get("effort"), value.get("format")
    is_effort = isinstance(effort, str | None) and len(effort or "") <= 64
    return is_effort and (form is None or form in OUTPUT_FORMATS[:2])


IDLE_EDIT = {"type": "clear_thinking_20251015", "keep": "all"}
RIGHT_EDITS: tuple[dict[str, Any], ...] = ({}, {"edits": []}, {"edits": None}, {"edits": [IDLE_EDIT]}, {"x": 1})
WRONG_EDITS: tuple[dict[str, Any], ...] = (
    {"edits": 5}, {"edits": [5]}, {"edits": [{"type": "clear_tool_uses_20250919"}]},
    {"edits": [{**IDLE_EDIT, "keep": 1}]},
)  # fmt: skip
PROMPT = Either(
    (
        Text(1),
        ListOf(TOKEN_ID, 5, 1, CONTEXT - 1),
        ListOf(Text(1), "x", 1, 1024),
        ListOf(ListOf(TOKEN_ID, 5, 1, CONTEXT - 1), [5], 1, 1024),
    )
)


def json_map(most: int) -> MapOf:
    """`logit_bias` over HTTP."""
    return MapOf(is_bias_key, str, BIAS, str, most, VOCAB)


def integer_map(most: int) -> MapOf:
    """`logit_bias` between processes."""
    return MapOf(TOKEN_ID.allows, int, BIAS, int, most, VOCAB)


def _sampling() -> Iterator[Parameter]:
    """What means the same everywhere; between processes null stands only where a value is optional."""
    everywhere = (*HTTP, ENGINE)
    yield Parameter("temperature", Number(0.0, 100.0), HTTP)
    yield Parameter("temperature", Number(0.0, 100.0, gap=NEARLY_ZERO), (ENGINE,), null=False)
    yield Parameter("top_k", whole(-1, INT32 - 1), HTTP)
    yield Parameter("top_k", whole(0, INT32 - 1), (ENGINE,), null=False)
    numbers: dict[str, Kind] = {
        "top_p": Number(0.0, 1.0),
        "min_p": Number(0.0, 1.0),
        "presence_penalty": Number(-2.0, 2.0),
        "frequency_penalty": Number(-2.0, 2.0),
        "repetition_penalty": Number(0.01, 100.0),
        "min_tokens": whole(0, 1),  # beside max_tokens 1
        "banned_token_ids": NOT_ALL_IDS,
        "stop_token_ids": IDS,
        "include_stop_str_in_output": Flag(),
        "ignore_eos": Flag(),
        "skip_special_tokens": Flag(),
    }
    yield Parameter("n", whole(1, 128), CHOICES)
    yield Parameter("n", whole(1, 128), (ENGINE,), null=False)
    for name, kind in numbers.items():
        extra = (EVERY_ID, EVERY_ID[1:]) if isinstance(kind, ListOf) else ()
        yield Parameter(name, kind, HTTP, extra=extra)
        yield Parameter(name, kind, (ENGINE,), null=False, extra=extra)
    yield Parameter("seed", whole(-INT63, INT63 - 1), HTTP)
    yield Parameter("seed", whole(-INT63, INT63 - 1), (ENGINE,), refused=(None,))
    yield Parameter("allowed_token_ids", ListOf(TOKEN_ID, 5, 1, 4096), everywhere)
    other_than_5 = ListOf(TOKEN_ID, 6, 0, 4096, together=lambda ids: bool(set(ids) - {5}))
    beside_a_ban = {"banned_token_ids": [5]}
    yield Parameter("allowed_token_ids", other_than_5, everywhere, beside=beside_a_ban, extra=([5], [5] * 4096, [5, 6]))
    yield Parameter("logit_bias", json_map(4096), HTTP)
    yield Parameter("logit_bias", integer_map(4096), (ENGINE,), null=False)
    yield Parameter("stop", Either((Text(1, 1024), STOP)), HTTP)
    yield Parameter("stop", STOP, (ENGINE,), null=False)
    yield Parameter("prompt_logprobs", COUNT20, (*CHOICES, ENGINE))
    yield Parameter("prompt_logprobs", COUNT20, (TEXT,), beside={"echo": True, "logprobs": 1})
    yield Parameter("logprobs", COUNT20, (TEXT, ENGINE))
    yield Parameter("logprobs", COUNT20, (TEXT,), beside={"echo": True})
    room = whole(1, CONTEXT - len(PROMPT_IDS))
    yield Parameter("max_tokens", room, (TEXT,), beside=ENDS_AT_ONCE)
    yield Parameter("max_tokens", room, (ENGINE,), null=False, beside=ENDS_AT_ONCE)
    yield Parameter("max_tokens", whole(1, CONTEXT - CHAT_PROMPT_TOKENS), (CHAT,), beside=ENDS_AT_ONCE)


def _requests() -> Iterator[Parameter]:
    """What only clients send."""
    yield from (Parameter(name, Flag(), HTTP) for name in ("stream", "add_special_tokens", "prefix_cache"))
    flags_of_choices = ("return_token_ids", "return_tokens_as_token_ids", "receipt", "explain")
    yield from (Parameter(name, Flag(), CHOICES) for name in flags_of_choices)
    yield Parameter("logprobs", Flag(), (CHAT,))
    parts = ("parallel_tool_calls", "include_reasoning", "separate_reasoning")
    flags = ("add_generation_prompt", "continue_final_message", *parts)
    yield from (Parameter(name, Flag(), TALKS) for name in flags)
    yield Parameter("echo", Flag(), (TEXT,))
    yield Parameter("top_logprobs", COUNT20, (CHAT,), beside={"logprobs": True})
    yield Parameter("top_logprobs", COUNT20, (RESPONSES,), beside={"include": [LOGPROBS]})
    yield Parameter("top_logprobs", whole(0, 0), TALKS)  # without logprobs there is nothing that could have some
    room = whole(1, CONTEXT - CHAT_PROMPT_TOKENS)
    yield Parameter("max_completion_tokens", room, (CHAT,), beside=ENDS_AT_ONCE)
    yield Parameter("max_output_tokens", room, (RESPONSES,), beside=ENDS_AT_ONCE)
    yield Parameter("priority", whole(-INT32, INT32 - 1), HTTP)
    name = Text(0, 1024, words=(MODEL,))
    too_long = ("x" * 1025, MEGABYTE_TEXT)
    yield Parameter("model", name, HTTP, status=404, extra=("../etc",), refused=too_long)
    yield Parameter("cache_salt", Text(0, 128, pattern=r"[\x21-\x7e]*"), HTTP, extra=("a b", "a\n", "\x7f", "~!"))
    yield Parameter("user", Text(), HTTP)
    yield Parameter("reasoning_effort", Text(), (CHAT,))
    yield Parameter("bad_words", ListOf(Text(1, 128, words=ONE_TOKEN), "x", 0, 256), HTTP)
    yield Parameter("modalities", ListOf(Text(words=("text",)), "text", 1, 1), TALKS)
    tool = {"function": {"name": "f"}}
    too_long = ([tool] * 255, [tool] * 256)  # as the template shows them
    yield Parameter("tools", ListOf(TOOL, tool, 0, 256), (CHAT,), refused=too_long, param="messages")
    yield Parameter("documents", ListOf(ANY_OBJECT, {}), TALKS)
    yield Parameter("tool_choice", Text(words=("auto", "none")), TALKS)
    examples: list[dict[str, Any]] = [
        {name: 5} for name in (*OURS, "a", "_a", "", "a b", "\xe9", "a\n", "a" * 64, "a" * 65)
    ]
    examples += [{f"a{i}": [i] for i in range(count)} for count in (16, 17)]
    kwargs = Object((*examples, {"a": math.nan}), is_template_kwargs)
    yield Parameter("chat_template_kwargs", kwargs, (*TALKS, TURNS))
    formats = ({}, {"type": "text"}, {"type": "json_object"}, {"type": 5}, {"type": None}, {"type": []})
    schemas = ({"name": "n", "schema": schema} for schema in ({}, {"type": "integer"}, {"type": "x"}, {"not": {}}, []))
    formats += tuple({"type": "json_schema", "json_schema": schema} for schema in (*schemas, {}, None, 5))
    yield Parameter("response_format", Object(formats, is_format), CHOICES)
    yield Parameter("structured_outputs", Object(OUTPUTS, is_outputs), HTTP)
    options = ({"include_usage": flag} for flag in (True, None, 1, "true", math.nan))
    yield Parameter("stream_options", Object(tuple(options), is_stream_options), CHOICES, beside={"stream": True})
    yield Parameter(
        "stream_options", Object(({}, {"include_usage": True}), lambda value: "include_usage" not in value), CHOICES
    )
    yield Parameter("an_unknown_field", Anything(), HTTP)
    yield from (Parameter(name, Nothing(no_ops), (CHAT,)) for name, no_ops in NOT_IN_CHAT.items())
    yield from (Parameter(name, Nothing(no_ops), (TEXT,)) for name, no_ops in NOT_IN_TEXT.items())
    yield from (Parameter(name, Nothing(EMPTY), HTTP) for name in NOWHERE)
    yield from (Parameter(name, Nothing(no_ops), HTTP) for name, no_ops in NEUTRAL_NUMBERS.items())
    yield from (Parameter(name, Either((Nothing(EMPTY), numbers)), HTTP) for name, numbers in NEUTRAL_RANGES.items())
    texts = (MEGABYTE_TEXT, [MEGABYTE_TEXT])
    yield Parameter("prompt", PROMPT, (TEXT,), null=False, required=True, refused=texts)
    messages = ListOf(MESSAGE, PLAIN, 1, 8192)
    yield Parameter("messages", messages, (CHAT,), null=False, required=True, refused=TOO_LONG_CHATS)


def _other_names() -> Iterator[Parameter]:
    """What other servers call it; an error has our name."""
    numbers = {
        "repeat_penalty": ("repetition_penalty", Number(0.01, 100.0)),
        "min_new_tokens": ("min_tokens", whole(0, 1)),
    }
    yield from (Parameter(name, kind, HTTP, means=ours) for name, (ours, kind) in numbers.items())
    yield Parameter("cache_prompt", Flag(), HTTP, means="prefix_cache")
    length = {"beside": {**ENDS_AT_ONCE, "max_tokens": None}, "means": "max_tokens"}
    text, chat = whole(1, CONTEXT - len(PROMPT_IDS)), whole(1, CONTEXT - CHAT_PROMPT_TOKENS)
    yield Parameter("max_new_tokens", text, (TEXT,), **length)
    yield Parameter("max_new_tokens", chat, (CHAT,), **length)
    yield Parameter("n_predict", Either((text, whole(-1, -1))), (TEXT,), **length)
    yield Parameter("n_predict", Either((chat, whole(-1, -1))), (CHAT,), **length)
    yield Parameter("think", Either((Flag(), Text(words=("low", "medium", "high")))), (*TALKS, TURNS))
    yield Parameter("thinking", Object(THINKINGS, is_thinking), TALKS)


def _messages() -> Iterator[Parameter]:
    """What only a gateway sends to a scheduler: the fields of `AddRequest`."""
    name = Text(1, 128)
    yield Parameter("request_id", name, (ENGINE,), null=False, param=ANY)
    yield Parameter("aliases", ListOf(name, "a"), (ENGINE,), null=False, param=ANY)
    prompt = ListOf(TOKEN_ID, 5, 1, CONTEXT - 1)
    yield Parameter("prompt_token_ids", prompt, (ENGINE,), null=False, param="prompt")
    yield Parameter("eos_token_ids", ListOf(TOKEN_ID, 5), (ENGINE,), null=False, extra=(EVERY_ID, [5] * 100_000))
    emitted = ListOf(ListOf(TOKEN_ID, 5, 0, 1), [], 0, 1)
    yield Parameter("emitted", emitted, (ENGINE,), null=False, extra=RESUMED, param=ANY)
    any_integer = whole(-INT63, UINT64 - 1)
    yield Parameter("priority", any_integer, (ENGINE,), null=False)
    yield Parameter("deadline", AnyNumber(), (ENGINE,), null=False)
    yield from (Parameter(text, Text(), (ENGINE,), null=False) for text in ("tenant", "cache_salt"))
    yield Parameter("use_prefix_cache", Flag(), (ENGINE,), null=False)


def _responses() -> Iterator[Parameter]:
    """What only a response is asked for in."""
    items = ListOf(ITEM, PLAIN, 1, 8192, together=lambda items: any(item.get("type") != "reasoning" for item in items))
    given = Either((Text(), items))
    yield Parameter("input", given, (RESPONSES,), null=False, required=True, refused=(MEGABYTE_TEXT, *TOO_LONG_CHATS))
    yield Parameter("instructions", Text(), (RESPONSES,), refused=(MEGABYTE_TEXT,), param=ANY)
    tool = {"type": "function", "name": "f"}
    too_long = ([tool] * 255, [tool] * 256)  # as the template shows them
    tools = ListOf(FLAT_TOOL, tool, 0, 256)
    yield Parameter("tools", tools, (RESPONSES,), refused=too_long, param="input")
    yield Parameter("text", Object(TEXTS, is_text_format), (RESPONSES,))
    yield Parameter("reasoning", Object(REASONINGS, is_reasoning), (RESPONSES,))
    yield Parameter("include", ListOf(Text(words=(LOGPROBS, "reasoning.encrypted_content")), LOGPROBS), (RESPONSES,))
    yield Parameter("metadata", Object(METADATA, is_metadata), (RESPONSES,))
    yield Parameter("stream_options", Object(STREAM_OPTIONS, lambda value: value != EVENT_IDS), (RESPONSES,))
    names = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    yield from (Parameter(name, Text(0, 1024), (RESPONSES,)) for name in names)
    yield Parameter("service_tier", Text(), (RESPONSES,))
    yield Parameter("truncation", Text(words=("disabled",)), (RESPONSES,))
    yield Parameter("store", Flag(), (RESPONSES,))
    yield Parameter("background", Nothing(), (RESPONSES,))
    yield from (Parameter(name, Nothing(EMPTY), (RESPONSES,)) for name in NOT_IN_RESPONSES)
    yield Parameter("function_call", Nothing(("none", "auto")), (RESPONSES,))
    yield Parameter("n_predict", Nothing((-1,)), (RESPONSES,))


def _turns() -> Iterator[Parameter]:
    """What only a message is asked for in."""
    door = (TURNS,)
    turns = ListOf(TURN, PLAIN, 1, 8192)
    yield Parameter("messages", turns, door, null=False, required=True, refused=TOO_LONG_CHATS)
    room = whole(1, CONTEXT - CHAT_PROMPT_TOKENS)
    yield Parameter("max_tokens", room, door, null=False, required=True, beside=ENDS_AT_ONCE)
    yield Parameter("stop_sequences", STOP, door)
    words = ListOf(Object((WORDS, {**WORDS, "text": 5}, RESULT, {}), lambda block: block == WORDS), WORDS)
    yield Parameter("system", Either((Text(), words)), door, refused=(MEGABYTE_TEXT,))
    too_long = ([CUSTOM] * 255, [CUSTOM] * 256)  # as the template shows them
    yield Parameter("tools", ListOf(CUSTOM_TOOL, CUSTOM, 0, 256), door, refused=too_long)
    for name, right, wrong in (
        ("tool_choice", RIGHT_CHOICES, WRONG_CHOICES),
        ("thinking", RIGHT_THOUGHTS, WRONG_THOUGHTS),
        ("output_format", OUTPUT_FORMATS[:2], OUTPUT_FORMATS[2:]),
        ("context_management", RIGHT_EDITS, WRONG_EDITS),
    ):
        yield Parameter(name, _one_of(right, wrong), door)
    yield Parameter("output_config", Object(CONFIGS, is_config), door)
    users = ({}, {"user_id": "u"}, {"user_id": None}, {"user_id": 5}, {"x": 1})
    yield Parameter("metadata", Object(users, lambda value: isinstance(value.get("user_id"), str | None)), door)
    yield Parameter("cache_control", Object(({}, {"type": "ephemeral"})), door)
    yield Parameter("service_tier", Text(), door)
    yield from (Parameter(name, Nothing(EMPTY), door) for name in NOT_IN_TURNS)
    yield Parameter("function_call", Nothing(("none", "auto")), door)
    yield Parameter("n_predict", Nothing((-1,)), door)


def _one_of(right: tuple[dict[str, Any], ...], wrong: tuple[dict[str, Any], ...]) -> Object:
    """An object that is none of the wrong ones; what else the table sends is judged by the first of these."""
    return Object((*right, *wrong), lambda value: value in right or ({} in right and value == {"a": 1}))


ROWS = (*_sampling(), *_requests(), *_other_names(), *_messages(), *_responses(), *_turns())


def cases(door: str) -> list[Case]:
    """All that can be sent at a door, each value of a row once."""
    found: list[Case] = []
    for row in ROWS:
        if door not in row.doors:
            continue
        values = [*COMMON, *row.kind.edges(), *row.extra, *row.refused]
        if door == ENGINE:  # a record has all of its fields, and no text
            values = [value for value in values if not isinstance(value, (Missing, Raw))]
        for value in {f"{type(value).__name__} {value!r}": value for value in values}.values():
            expected = expect_of_engine(row, value) if door == ENGINE else expect_of_gateway(row, value)
            found.append(Case(len(found), door, row, value, expected))
    return found


def sample(every: list[Case], one_in: int) -> list[Case]:
    """The same part in every run: each row has its share of it."""
    return every[::one_in]


def expect_of_gateway(row: Parameter, value: Any) -> Expected:
    """The answer to an HTTP request with this value. null is absence."""
    if value is Missing.MISSING or (value is None and (row.null or row.required)):
        code = "missing_required_parameter"
        return Expected(Outcome.REFUSED, 400, row.name, code) if row.required else Expected(Outcome.ACCEPTED)
    if not is_json(value):
        return Expected(Outcome.REFUSED, 400, None, "invalid_json")
    if value in row.refused:
        return Expected(Outcome.REFUSED, 400, row.param or row.name)
    if row.kind.allows(value):
        return Expected(Outcome.ACCEPTED)
    return Expected(Outcome.REFUSED, row.status if row.kind.has_type(value) else 400, row.means or row.name)


def expect_of_engine(row: Parameter, value: Any) -> Expected:
    """What a scheduler does with an `AddRequest` that holds this value."""
    if not is_encodable(value):
        return Expected(Outcome.UNENCODABLE)
    refused = Expected(Outcome.REFUSED, 400, row.param or row.name)
    if value in row.refused:
        return refused
    if value is None:
        return Expected(Outcome.ACCEPTED if row.null else Outcome.DROPPED)
    if not row.kind.has_type(value):
        return Expected(Outcome.DROPPED)
    return Expected(Outcome.ACCEPTED) if row.kind.allows(value) else refused


_SURROGATE = re.compile("[\ud800-\udfff]")


def leaves(value: Any) -> Iterator[Any]:
    """Every key and value in a value that is neither a list nor a map."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def is_text(value: str) -> bool:
    """Whether UTF-8 has it."""
    return _SURROGATE.search(value) is None


def is_json(value: Any) -> bool:
    """Whether JSON has it: no lone surrogate, no number that is none or beyond all bounds."""
    return not any(
        isinstance(leaf, Raw) or (isinstance(leaf, float) and not math.isfinite(leaf))
        or (isinstance(leaf, str) and not is_text(leaf))
        for leaf in leaves(value)
    )  # fmt: skip


def is_encodable(value: Any) -> bool:
    """Whether msgpack has it: integers of 64 bits, and text."""
    return not any(
        (isinstance(leaf, int) and not -INT63 <= leaf < UINT64) or (isinstance(leaf, str) and not is_text(leaf))
        for leaf in leaves(value)
    )
