"""Tokens that a checkpoint's other files add to those of its tokenizer.json, with the ids that transformers gives them.

tokenizer_config.json may say it all (`added_tokens_decoder`). Where it does not, added_tokens.json lists such tokens,
and special_tokens_map.json names the special ones and has the last word on them. Tokens behind the model's last one, of
which there are some in many checkpoints, are left out: the model could not read them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from novainfer.checkpoint import read_json, vocab_size
from novainfer.errors import ConfigError, words_of

_log = logging.getLogger(__name__)

CONFIG_FILE = "tokenizer_config.json"
_OLDER_FILE, _NAMES_FILE = "added_tokens.json", "special_tokens_map.json"
# In transformers' order: those that no file gives an id get the next ones by it.
NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Complete the `backend` of the tokenizer in `folder`. Returns the special tokens with a name of their own, as
    'bos_token' -> '<s>'.

    config: of tokenizer_config.json. Raises `ConfigError` for what is no token.
    """
    is_older = config.get("added_tokens_decoder") is None
    source = folder / (_OLDER_FILE if is_older else CONFIG_FILE)
    names = read_json(folder / _NAMES_FILE) if is_older else {}
    try:
        named, others = _special_tokens(config, names)
        special = {token.content for token in (*(named[name] for name in NAMED_SPECIALS if name in named), *others)}
        numbered = _older_tokens(read_json(source), special) if is_older else _tokens(config["added_tokens_decoder"])
    except (TypeError, ValueError, AttributeError) as error:  # what stands there is no token
        raise ConfigError(f"the added tokens of {folder} cannot be read: {words_of(error)}") from None
    _add(backend, numbered, is_older, named, others, vocab_size(folder))
    for index, token in numbered.items():
        found = backend.token_to_id(token.content)
        if found is not None and found != index:
            words = "%s gives the token %r the id %d, but behind those of tokenizer.json it has %d"
            _log.warning(words, source, token.content, index, found)
    return {name: named[name].content for name in NAMED_SPECIALS if name in named}


def _add(
    backend: tokenizers.Tokenizer,
    numbered: Mapping[int, AddedToken],
    is_older: bool,
    named: Mapping[str, AddedToken],
    others: Iterable[AddedToken],
    most: int | None,
) -> None:
    """As transformers does, and in its order: by the ids given, then by name, then the rest; no ids from `most` on."""
    own = backend.get_added_tokens_decoder()
    by_id = {**numbered, **own} if is_older else numbered
    wanted = {token.content: token for _, token in sorted(by_id.items())}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}  # copies: some are changed
    for token in (*named.values(), *others):
        if token.content not in wanted:
            wanted[token.content] = known.get(token.content, token)
    for token in named.values():  # special even where tokenizer.json does not say so
        wanted[token.content].special = True
    left_out = _behind(backend, [content for content in wanted if backend.token_to_id(content) is None], most)
    changed = (token for content, token in wanted.items() if known.get(content) != token)
    backend.add_tokens([token for token in changed if token.content not in left_out])


def _behind(backend: tokenizers.Tokenizer, new: list[str], most: int | None) -> set[str]:
    """Which of these tokens would get ids from `most` on."""
    if not new or most is None:
        return set()
    next_id = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    return set(new[max(most - next_id, 0) :])


def _special_tokens(
    config: Mapping[str, Any], names: Mapping[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Those with a name, such as 'bos_token' or a model's own 'image_token', and all others."""
    found = {**config, **names}
    others = found.get("extra_special_tokens") or found.get("additional_special_tokens") or []
    own_names = [name for name in found if name.endswith("_token") and name not in NAMED_SPECIALS]
    values = {name: found.get(name) for name in (*NAMED_SPECIALS, *own_names)}
    values |= found.get("model_specific_special_tokens") or {}
    if isinstance(others, dict):  # they have names
        values |= others
        others = []
    if not isinstance(others, list):
        raise TypeError(f"a list of special tokens is {others!r}")
    named = {name: _special(value) for name, value in values.items() if isinstance(value, (str, dict)) and value}
    return named, [_special(value) for value in others]


def _special(value: str | dict[str, Any]) -> AddedToken:
    """Either file may spell a token as a string or as an object with its content."""
    return AddedToken(value, special=True) if isinstance(value, str) else _token(value, special=True)


def _token(value: Mapping[str, Any], **more: bool) -> AddedToken:
    return AddedToken(**{name: part for name, part in value.items() if name != "__type"} | more)


def _tokens(added: Mapping[str, Mapping[str, Any]]) -> dict[int, AddedToken]:
    return {int(index): _token(value) for index, value in added.items()}


def _older_tokens(ids: Mapping[str, int], special: set[str]) -> dict[int, AddedToken]:
    """All that is known of a token here is its id."""
    return {
        int(index): AddedToken(content, normalized=content not in special, special=content in special)
        for content, index in ids.items()
    }
