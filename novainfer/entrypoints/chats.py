"""A conversation as the prompt of the offline `LLM`: by the template and with the settings of the server's chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novainfer.errors import InvalidRequestError
from novainfer.text.chat_template import OWN_NAMES, ChatTemplate
from novainfer.text.templates import read_template
from novainfer.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a conversation is shown. add_generation_prompt: by default, where no message is to be continued.

    Raises `InvalidRequestError` for what the server's chats refuse.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.template_kwargs, Mapping | None):
            raise InvalidRequestError("chat_template_kwargs are a dict", param="chat_template_kwargs")
        own = [name for name in self.template_kwargs or () if name in OWN_NAMES]
        if own:
            words = f"chat_template_kwargs: {own[0]} is a name that the template has already"
            raise InvalidRequestError(words, param="chat_template_kwargs")
        if not isinstance(self.tools, list | tuple | None) or not all(map(_is_tool, self.tools or ())):
            words = "tools are a list of dicts, each with a function that has a name"
            raise InvalidRequestError(words, param="tools")


def _is_tool(tool: Any) -> bool:
    """All else in it is the caller's and the template's matter."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and name != ""


class ChatPrompts:
    """Makes them. The model's own templates are compiled at the first conversation: who has none may do without."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        """chat_template: the file of one that takes the place of the model's own. Raises `ConfigError`."""
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            self._template = ChatTemplate.of(tokenizer, read_template(Path(chat_template)))

    def encode(self, conversations: Sequence[Messages], manner: Manner) -> list[list[int]]:
        """The token ids of each. Raises `InvalidRequestError`."""
        if self._template is None:
            self._template = ChatTemplate.of(self._tokenizer)
        add_prompt = manner.add_generation_prompt
        if add_prompt is None:
            add_prompt = not manner.continue_final_message
        texts = [
            self._template.render(
                messages,
                tools=manner.tools,
                add_generation_prompt=add_prompt,
                continue_final_message=manner.continue_final_message,
                template_kwargs=manner.template_kwargs,
            )
            for messages in conversations
        ]
        # The template writes the special tokens itself.
        return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]


def check_conversations(conversations: Any) -> None:
    """Raise `InvalidRequestError` unless it is a list of conversations."""
    lists = conversations if isinstance(conversations, (list, tuple)) else [None]
    for messages in lists:
        if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(m, dict) for m in messages):
            raise InvalidRequestError("a conversation is a list of messages, each a dict", param="messages")
