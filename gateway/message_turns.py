"""The messages of `/v1/messages` as those of a chat: blocks on the left, what a template reads on the right.

A user's message may hold what came of calls beside words: then it is several messages of a chat, in that order. An
assistant's is one, whose words stand before its calls.
"""

from __future__ import annotations

from array import array
from typing import Any

from novainfer.errors import InvalidRequestError

Message = dict[str, Any]
SYSTEM = -1  # in place of a message's number
CALL_PREFIX = "toolu_"  # of a call's id; behind it stands what a chat's template may read
INVALID_JSON = "INVALID_JSON"  # the only key of a call's input that was no JSON object: its text
_PARAM = "messages"
_ROLES = ("user", "assistant")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "tool_result": ("text",),
    "system": ("text",),
}
_MEDIA = ("image", "document", "search_result", "container_upload")


class Turns:
    """A chat's messages. places: where each came from, `SYSTEM` or the number of a message; a few bytes each."""

    def __init__(self, system: str | list[dict[str, Any]] | None, given: list[dict[str, Any]]) -> None:
        """Raises `InvalidRequestError`."""
        self.messages: list[Message] = []
        self.places = array("h")
        if system:
            self._say("system", system if isinstance(system, str) else _texts_of(system, "system", "system"), SYSTEM)
        for number, message in enumerate(given):
            self._add(message, number)

    @property
    def is_continued(self) -> bool:
        """The last message is the beginning of the answer."""
        return bool(self.messages[-1]["role"] == "assistant")

    def _add(self, message: dict[str, Any], number: int) -> None:
        role, content, where = message.get("role"), message.get("content"), f"messages[{number}]"
        if not isinstance(role, str) or role not in _ROLES:
            raise _invalid(f"{where}.role must be user or assistant: instructions stand in the field system.")
        if isinstance(content, str):
            self._say(role, content, number)
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise _invalid(f"{where}.content must be a string, or a list of blocks.")
        elif role == "assistant":
            self._answer(content, number)
        elif content:
            self._ask(content, number)
        else:
            raise _invalid(f"{where}.content must have a block.")

    def _say(self, role: str, content: Any, number: int) -> Message:
        message: Message = {"role": role, "content": content}
        self.messages.append(message)
        self.places.append(number)
        return message

    def _ask(self, content: list[dict[str, Any]], number: int) -> None:
        """What a user says: words that stand together are one message."""
        words: list[dict[str, str]] = []
        for place, block in enumerate(content):
            where = f"messages[{number}].content[{place}]"
            if _kind_of(block, "user", where) == "text":
                if not words:
                    self._say("user", words, number)
                words.append(_text_part(block, where))
            else:
                words = []
                self._result(block, number, where)

    def _result(self, block: dict[str, Any], number: int, where: str) -> None:
        call, given, is_error = _string(block, "tool_use_id", where), block.get("content"), block.get("is_error")
        if not isinstance(is_error, bool | None):
            raise _invalid(f"{where}.is_error must be true or false.")
        parts: list[dict[str, str]] = []
        if isinstance(given, str):
            parts = [{"type": "text", "text": given}]
        elif given is not None:
            parts = _texts_of(given, "tool_result", f"{where}.content")
        if is_error:  # a template has no other way to tell it
            parts = [{"type": "text", "text": "Error:"}, *parts]
        self._say("tool", parts or "", number)["tool_call_id"] = call.removeprefix(CALL_PREFIX)

    def _answer(self, content: list[dict[str, Any]], number: int) -> None:
        words: list[dict[str, str]] = []
        thoughts, calls = [], []
        for place, block in enumerate(content):
            where = f"messages[{number}].content[{place}]"
            kind = _kind_of(block, "assistant", where)
            if kind == "text":
                words.append(_text_part(block, where))
            elif kind == "thinking":
                thoughts.append(_string(block, "thinking", where))
            elif kind == "tool_use":
                calls.append(_call(block, where))
        message = self._say("assistant", words or ("" if not calls else None), number)
        if any(thoughts):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
        if calls:
            message["tool_calls"] = calls


def _kind_of(block: dict[str, Any], holder: str, where: str) -> str:
    kind = block.get("type")
    if kind in _MEDIA:
        raise _invalid(f"{where}: blocks of the type {kind} are not supported: this server reads text alone.")
    known = _BLOCKS[holder]
    if not isinstance(kind, str) or kind not in known:
        raise _invalid(f"{where}.type must be one of {', '.join(known)} here.")
    return kind


def _texts_of(blocks: Any, holder: str, where: str) -> list[dict[str, str]]:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise _invalid(f"{where} must be a string, or a list of blocks.")
    for place, block in enumerate(blocks):
        _kind_of(block, holder, f"{where}[{place}]")
    return [_text_part(block, f"{where}[{place}]") for place, block in enumerate(blocks)]


def _text_part(block: dict[str, Any], where: str) -> dict[str, str]:
    return {"type": "text", "text": _string(block, "text", where)}


def _string(block: dict[str, Any], key: str, where: str) -> str:
    text = block.get(key)
    if not isinstance(text, str):
        raise _invalid(f"{where}.{key} must be a string.")
    return text


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    call, name, given = _string(block, "id", where), _string(block, "name", where), block.get("input")
    if not isinstance(given, dict):
        raise _invalid(f"{where}.input must be an object.")
    text = given.get(INVALID_JSON)
    arguments = text if isinstance(text, str) and len(given) == 1 else given
    function = {"name": name, "arguments": arguments}
    return {"id": call.removeprefix(CALL_PREFIX), "type": "function", "function": function}


def _invalid(words: str) -> InvalidRequestError:
    return InvalidRequestError(words, param="system" if words.startswith("system") else _PARAM)
