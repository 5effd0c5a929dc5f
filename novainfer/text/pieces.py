"""How a tokenizer's decoder turns tokens back to text, read from the decoder that tokenizer.json describes.

Knowing the decoder makes incremental decoding exact and O(1) a token. Two kinds cover the causal language models:
byte-level (each token spells bytes in a 256-letter alphabet, as GPT-2) and pieces (SentencePiece: plain text with
a mark for the space, and bytes like <0xE2> as a fallback).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from novainfer.errors import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 letters stand for themselves, other bytes for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The rules that turn one token into bytes, and a sequence of them into text.

    byte_level: tokens spell bytes; the whole is decoded as UTF-8 with replacement characters.
    byte_fallback: <0xHH> tokens are bytes; those in a row spell characters, and a byte of none is a replacement
    character.
    replacements: (mark, text) replaced in each token.   strip: (char, count) cut from the start of the text.
    drop_in_first: this character vanishes from the first token.   separator: stands between tokens.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: tuple[str, int] = ("", 0)
    drop_in_first: str = ""
    separator: str = ""

    def byte_of(self, token: str) -> int | None:
        """The byte that a byte-fallback token stands for, None for any other token."""
        match = _BYTE_PIECE.fullmatch(token) if self.byte_fallback else None
        return int(match[1], 16) if match else None

    def text_of(self, token: str) -> str:
        """The text of a token that is no byte, wherever it stands but first."""
        for mark, text in self.replacements:
            token = token.replace(mark, text)
        return token

    def bytes_of(self, token: str) -> bytes:
        """The bytes that one token stands for by itself."""
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:  # an added token that is spelled plainly
                return token.encode()
        byte = self.byte_of(token)
        return self.text_of(token).encode() if byte is None else bytes([byte])


def parse_decoder(decoder_json: bytes | None) -> Pieces:
    """Read the decoder of a tokenizer, None if it has none. Raises `ConfigError` for a kind that no causal LM here
    uses.
    """
    if decoder_json is None:
        return Pieces(separator=" ")
    spec = json.loads(decoder_json)
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Pieces(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        drop = "" if steps[0].get("prepend_scheme", "always") == "never" else mark
        return Pieces(replacements=((mark, " "),), drop_in_first=drop)
    return _parse_steps(steps)


def _parse_steps(steps: list[dict[str, Any]]) -> Pieces:
    replacements: list[tuple[str, str]] = []
    strip, byte_fallback, fused = ("", 0), False, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not byte_fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and strip == ("", 0) and step["stop"] == 0:
            strip = (step["content"], step["start"])
        else:
            raise ConfigError(f"the tokenizer's decoder step '{kind}' is not supported here")
    return Pieces(byte_fallback=byte_fallback, replacements=tuple(replacements), strip=strip)
