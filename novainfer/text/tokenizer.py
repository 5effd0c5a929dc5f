"""A checkpoint's tokenizer, read with the `tokenizers` library alone (transformers would pull in torch).

Text to token ids and back, special tokens, end-of-sequence ids and the sampling defaults that come with the model.
What it says never changes after loading; safe to use from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from novainfer.checkpoint import read_json
from novainfer.errors import ConfigError, words_of
from novainfer.text.added_tokens import CONFIG_FILE, add_tokens
from novainfer.text.generation_defaults import FILE, GenerationDefaults
from novainfer.text.pieces import Pieces, parse_decoder
from novainfer.text.templates import read_templates

_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "sentencepiece.bpe.model")
_SHORTENING = 4  # how much shorter a normalizer may make a text before we think that somebody is joking
_KEPT_TOKENS = 2**15


class Tokenizer:
    """Text <-> token ids of one model.

    eos_token_ids: every id that ends a text.   special_tokens: 'bos_token' and the like by name.
    generation_defaults: what generation_config.json says about sampling.   chat_templates: by name.
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: Path) -> None:
        backend.no_truncation()  # a saved tokenizer may carry the settings it was trained with
        backend.no_padding()
        config = read_json(folder / CONFIG_FILE)
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        self._backend = backend
        self.special_tokens = add_tokens(backend, folder, config)
        # The decoder's part alone: all of a tokenizer is megabytes of JSON.
        self.pieces: Pieces = parse_decoder(None if backend.decoder is None else backend.decoder.__getstate__())
        # The same tokens come again and again.
        self._token_bytes = lru_cache(_KEPT_TOKENS)(self._spell)
        self._whole_text = lru_cache(_KEPT_TOKENS)(self._spell_whole)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.model_max_length = _plain_int(config.get("model_max_length"))
        self.chat_templates = read_templates(folder, config)
        self.eos_token_ids = self._find_eos(read_json(folder / FILE), read_json(folder / "config.json"))
        self.generation_defaults = GenerationDefaults.read(folder)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer in `folder`; raises `ConfigError` with what to do about it when that is impossible."""
        path = find_tokenizer(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} cannot be read: {words_of(error)}") from None
        return cls(backend, folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: with what the model's own post-processor puts around it."""
        # Unlike `encode`, a batch of one lets other threads run meanwhile: an event loop must not stand still.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def check_fits(self, vocab_size: int | None) -> None:
        """Raise `ConfigError` if this tokenizer is not that of a model with so many token ids (None: not known).

        A few tokens that were added beyond the model's are not counted: they are found in many checkpoints.
        """
        own = self._backend.get_vocab_size(with_added_tokens=False)
        if vocab_size is not None and own > vocab_size:
            raise ConfigError(f"the tokenizer has {own} tokens, the model only {vocab_size}: they do not fit together")

    def fits(self, text: str, num_tokens: int) -> bool:
        """False if the text is far too long for so many tokens; cheap, to be asked before `encode`.

        A normalizer may shorten a text (white space, composed characters) before it is cut: hence the margin.
        """
        most = _SHORTENING * num_tokens
        return len(text) <= most or len(text) <= most * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """In characters. Looked for only where it matters: a large vocabulary takes a tenth of a second."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the vocabulary lacks have none."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it lacks."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are spelled, in the order of their ids."""
        return tuple(text for i in sorted(self.special_ids) if (text := self.token(i)))

    def special_ids_of(self, texts: Iterable[str]) -> dict[int, str]:
        """Those of these texts that are special tokens, by their ids."""
        found = {self.token_id(text): text for text in texts}
        return {token_id: text for token_id, text in found.items() if token_id in self.special_ids}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for by itself; may be part of a character."""
        return self._token_bytes(token_id)

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id [vocab_size]; nothing for those that the vocabulary lacks."""
        found = [b""] * self.vocab_size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            found[token_id] = self.pieces.bytes_of(token)
        return found

    @property
    def whole_text(self) -> Callable[[int], str | None]:
        """From a token to the text of its bytes; None if they are not whole characters."""
        return self._whole_text

    def _spell_whole(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _spell(self, token_id: int) -> bytes:
        token = self.token(token_id)
        return b"" if token is None else self.pieces.bytes_of(token)

    def _find_eos(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
        """The model's ids, and the tokenizer's own: chat models name their end of turn in either place."""
        named = generation.get("eos_token_id")
        if named is None:
            text_config = config.get("text_config")
            named = config.get("eos_token_id", text_config.get("eos_token_id") if text_config else None)
        ids = [i for i in (named if isinstance(named, list) else [named]) if _plain_int(i) is not None]
        own = self.token_id(self.special_tokens.get("eos_token", ""))
        if own is not None and own not in ids:
            ids.append(own)
        return tuple(ids)


def find_tokenizer(folder: Path) -> Path:
    """The file that `Tokenizer.load` reads. Raises `ConfigError` with what to do if there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(_missing(folder))
    return path


def _missing(folder: Path) -> str:
    slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
    if not slow:
        return f"{folder} holds no tokenizer.json"
    return (
        f"{folder} holds only {slow[0]}, a tokenizer that needs converting. Once, where transformers is installed: "
        f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\""
    )


def _plain_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
