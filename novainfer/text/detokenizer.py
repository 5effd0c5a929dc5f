"""Incremental decoding: token ids in, finished text out, never half a character.

The deltas joined, with the flush, are exactly what `Tokenizer.decode` gives for all ids at once, but in one case: where
byte-fallback tokens in a row are not UTF-8, that makes replacement characters of them all, which only the end of the
row can tell. Here those of its characters that are whole have been told by then, and a stop string was found, and stay
told. The state is a function of the ids fed, so a resumed request rebuilds it by feeding what was emitted.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from novainfer.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one choice.

    after_prompt: the text goes on from a prompt, so nothing is cut from its start (SentencePiece decoders drop the
    space before the first word, which would glue it to the prompt).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after_prompt: bool = False) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8: codecs.IncrementalDecoder | None = None  # where tokens were not whole characters
        self._whole_text = tokenizer.whole_text
        self._needs_context = not self._pieces.byte_level  # what a token adds depends on those before it
        self._partial = b""  # of a character, from byte-fallback tokens
        self._first = not after_prompt
        self._strip_left = 0 if after_prompt else self._pieces.strip[1]

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens finish."""
        if not self._needs_context and self._skipped.isdisjoint(token_ids):
            texts = [*map(self._whole_text, token_ids)]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    @property
    def is_between(self) -> bool:
        """What a token that is not special adds now is the text of its bytes, if that is whole."""
        return not self._needs_context

    def flush(self) -> str:
        """The rest, at the end: characters cut short become replacement characters."""
        if not self._pieces.byte_level:
            return self._end_byte_run()
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)

    def feed_token(self, token_id: int) -> str:
        """The text that this token finishes."""
        if token_id in self._skipped:
            return ""
        text = None if self._needs_context else self._whole_text(token_id)
        if text is not None:
            return text
        if self._pieces.byte_level:
            return self._feed_bytes(token_id)
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        byte = self._pieces.byte_of(token)
        if byte is not None:
            self._first = False
            return self._cut(self._feed_byte(bytes([byte])))
        return self._end_byte_run() + self._cut(self._spell(token))

    def _feed_bytes(self, token_id: int) -> str:
        if self._utf8 is None:
            self._utf8 = _Utf8Decoder("replace")
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._needs_context = bool(self._utf8.getstate()[0])  # a part of a character is left
        return text

    def _spell(self, token: str) -> str:
        if not self._first:
            return self._pieces.separator + self._pieces.text_of(token)
        self._first = False
        if self._pieces.drop_in_first:
            token = token.replace(self._pieces.drop_in_first, "")
        return self._pieces.text_of(token)

    def _feed_byte(self, byte: bytes) -> str:
        """Of a byte-fallback token. A byte that is of no character is one replacement character."""
        for start in range(len(self._partial) + 1):
            data = (self._partial + byte)[start:]
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    continue
                text, self._partial = "", data
            else:
                self._partial = b""
            return "\ufffd" * start + text
        lost, self._partial = len(self._partial) + 1, b""
        return "\ufffd" * lost

    def _end_byte_run(self) -> str:
        """Of a character that was begun, each byte is one replacement character."""
        lost, self._partial = len(self._partial), b""
        return self._cut("\ufffd" * lost)

    def _cut(self, text: str) -> str:
        """Drop the leading characters that the decoder strips from the whole text."""
        while self._strip_left and text:
            if text[0] != self._pieces.strip[0]:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text
