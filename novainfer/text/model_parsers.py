"""Which parsers fit a model, and whether a prompt of it ends inside a thought."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from novainfer.text.parts import ALLOWED, BARRED, BEGUN, NONE, Parsers, choose_parsers, ends_behind, ends_inside
from novainfer.text.reasoning import CLOSE, OPEN
from novainfer.text.templates import read_template
from novainfer.text.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens; a mark is one, or a few
_MESSAGE_END = 4096  # of a message that is continued: how much of it is looked at


def parsers_of(tokenizer: Tokenizer, calls: str, reasoning: str, chat_template: str | None) -> Parsers:
    """Those of these names; `auto` is chosen for the model. chat_template: the path of one in place of its own."""
    own = tokenizer.chat_templates.values()
    templates = own if chat_template is None else [read_template(Path(chat_template))]
    return choose_parsers(calls, reasoning, templates, has_thoughts=tokenizer.token_id(CLOSE) is not None)


def begins_inside(reasoning: str, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, is_continued: bool) -> bool:
    """Whether the prompt has begun a thought, as that parser knows them, and not ended it.

    is_continued: the answer goes on from a message, which may have begun it anywhere.
    """
    if reasoning == NONE:
        return False
    return _has_begun(tokenizer, prompt_token_ids, is_continued=is_continued)


def thoughts_after(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, is_continued: bool) -> str:
    """Whether an answer may think first: ALLOWED, BEGUN by the prompt, or BARRED, since the prompt has ended a thought.

    is_continued: the prompt ends with the beginning of the answer.
    """
    if _has_begun(tokenizer, prompt_token_ids, is_continued=is_continued):
        return BEGUN
    return BARRED if is_continued or ends_behind(_end_of(prompt_token_ids, tokenizer, _PROMPT_END)) else ALLOWED


def _has_begun(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, is_continued: bool) -> bool:
    if not is_continued:
        return ends_inside(_end_of(prompt_token_ids, tokenizer, _PROMPT_END))
    end = _end_of(prompt_token_ids, tokenizer, _MESSAGE_END)
    return end.rfind(OPEN) > end.rfind(CLOSE)


def _end_of(prompt_token_ids: Sequence[int], tokenizer: Tokenizer, count: int) -> str:
    return tokenizer.decode(prompt_token_ids[-count:], skip_special_tokens=False)
