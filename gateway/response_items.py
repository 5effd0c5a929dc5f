"""The input of `/v1/responses` as the messages of a chat: items on the left, what a template reads on the right.

What an assistant said in one turn are several items here and one message there: a thought, words, and calls. Words
begin a message of their own, unless a thought stands right before them or only calls do, of which the answers of this
server may have some before their words. Calls belong to the words and calls before them. What a part of a content may
be is a chat's matter: parts are passed on as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from novainfer.errors import InvalidRequestError

Message = dict[str, Any]
ITEM_ROLES = ("user", "system", "developer", "assistant")
INSTRUCTIONS = -1  # in place of an item's number
_PARAM = "input"


class Places:
    """Where messages came from. They are kept as long as a request runs, thousands maybe: each takes a few bytes."""

    __slots__ = ("_begins", "_contents", "_names")

    def __init__(self) -> None:
        self._begins = array("h")  # numbers of items
        self._contents = array("h")  # of those that hold the content
        self._names: list[str] = []  # of the field that does

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, number: int, name: str) -> None:
        """The next message is of this item, and its content in this field."""
        self._begins.append(number)
        self._contents.append(number)
        self._names.append(name)

    def move_content(self, number: int) -> None:
        """That of the last message came with a later item."""
        self._contents[-1] = number

    def of_message(self, number: int) -> str:
        """The item, or field, where a message begins."""
        return _item(self._begins[number])

    def of_content(self, number: int) -> str:
        """The field that its content is."""
        item = self._contents[number]
        return _item(item) if item == INSTRUCTIONS else f"{_item(item)}.{self._names[number]}"


def _item(number: int) -> str:
    return "instructions" if number == INSTRUCTIONS else f"input[{number}]"


class Messages:
    """The messages so far, and where each came from."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places = Places()
        self._turn: Message | None = None  # an assistant's that may have more
        self._thoughts: list[str] = []  # of the turn that is to come
        self._kinds: dict[str, Callable[[dict[str, Any], int], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": self._thought,
        }

    def add(self, item: dict[str, Any], number: int) -> None:
        """The next item. Raises `InvalidRequestError`."""
        kind = item.get("type")
        if kind is None:
            kind = "message"
        take = self._kinds.get(kind) if isinstance(kind, str) else None
        if take is None:
            known = ", ".join(self._kinds)
            words = f"input[{number}].type must be one of {known}: the server has no other tools, and keeps no items."
            raise _invalid(words)
        take(item, number)

    def say(self, role: str, content: Any, number: int, name: str = "content") -> Message:
        """A message of its own. name: of the field that its content is."""
        message: Message = {"role": role, "content": content}
        self._put(message, number, name)
        return message

    def _put(self, message: Message, number: int, name: str = "content") -> None:
        self._turn = None
        self._thoughts.clear()
        self.messages.append(message)
        self.places.add(number, name)

    def _message(self, item: dict[str, Any], number: int) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in ITEM_ROLES:
            raise _invalid(f"input[{number}].role must be one of {', '.join(ITEM_ROLES)}.")
        _check_content(content, f"input[{number}].content")
        if role != "assistant":
            self.say(role, content, number)
        elif self._turn is not None and self._turn["content"] is None and not self._thoughts:
            self._turn["content"] = content
            self.places.move_content(number)
        else:
            self._begin_turn(number)["content"] = content

    def _call(self, item: dict[str, Any], number: int) -> None:
        call_id, name, arguments = (_text_of(item, key, number) for key in ("call_id", "name", "arguments"))
        turn = self._turn
        if turn is None or self._thoughts:
            turn = self._begin_turn(number)
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: dict[str, Any], number: int) -> None:
        call_id, output = _text_of(item, "call_id", number), item.get("output")
        _check_content(output, f"input[{number}].output")
        self.say("tool", output, number, "output")["tool_call_id"] = call_id

    def _thought(self, item: dict[str, Any], number: int) -> None:
        """Its summary is none of this server's, and what is encrypted nobody here can read."""
        content = item.get("content")
        if content is None:
            return
        if not isinstance(content, list):
            raise _invalid(f"input[{number}].content must be a list of parts of the type reasoning_text.")
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "reasoning_text" else None
            if not isinstance(text, str):
                raise _invalid(f"input[{number}].content must be a list of parts of the type reasoning_text.")
            self._thoughts += [text] * (text != "")

    def _begin_turn(self, number: int) -> Message:
        turn: Message = {"role": "assistant", "content": None}
        if self._thoughts:
            turn["reasoning_content"] = "\n".join(self._thoughts)
        self._put(turn, number)
        self._turn = turn
        return turn


def messages_of(given: str | list[dict[str, Any]], instructions: str | None) -> Messages:
    """Those of a request. Raises `InvalidRequestError`."""
    messages = Messages()
    if instructions is not None:
        messages.say("system", instructions, INSTRUCTIONS)
    if isinstance(given, str):
        messages.say("user", given, 0)
        return messages
    for number, item in enumerate(given):
        messages.add(item, number)
    if len(messages.messages) == (instructions is not None):
        raise _invalid("input holds nothing but reasoning.")
    return messages


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _invalid(f"{where} must be a string, or a list of parts.")


def _text_of(item: dict[str, Any], key: str, number: int) -> str:
    text = item.get(key)
    if not isinstance(text, str):
        raise _invalid(f"input[{number}].{key} must be a string.")
    return text


def _invalid(words: str) -> InvalidRequestError:
    return InvalidRequestError(words, param=_PARAM)
