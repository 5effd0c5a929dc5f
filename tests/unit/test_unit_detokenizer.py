"""Incremental decoding equals decoding at once, for every decoder that causal language models use."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from novainfer.errors import ConfigError
from novainfer.text.detokenizer import Detokenizer
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import LLAMA, LLAMA_PARTS, write_sentencepiece, write_tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

_DECODERS = {
    "llama": LLAMA,
    "gemma": decoders.Sequence(LLAMA_PARTS[:3]),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "none": None,
}
KINDS = ["byte_level", *_DECODERS]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        if kind == "byte_level":
            return Tokenizer.load(write_tokenizer(Path(folder)))
        words = ["▁", "▁▁", "▁hello", "hello", "▁a", "b", "é", "你", "▁▁c", "\ufffd", "x▁y"]
        return Tokenizer.load(write_sentencepiece(Path(folder), words, _DECODERS[kind]))


def ids_near_the_words(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokenizer_of(kind).vocab_size
    return st.lists(st.one_of(st.integers(0, size + 2), st.integers(size - 11, size - 1)), max_size=24)


def special_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Some beside plain ones."""
    tokenizer = tokenizer_of(kind)
    plain, special = st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(sorted(tokenizer.special_ids) or [0])
    return st.lists(st.one_of(plain, special), max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_given_random_ids_when_fed_in_runs_then_as_one_by_one(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    runs = data.draw(st.lists(st.one_of(ids_near_the_words(kind), special_ids(kind)), max_size=6))
    skip = data.draw(st.booleans())
    together, apart = (Detokenizer(tokenizer, skip_special_tokens=skip) for _ in range(2))
    for run in runs:
        assert together.feed(run) == "".join([apart.feed_token(token_id) for token_id in run])
    assert together.flush() == apart.flush()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_given_random_ids_when_fed_one_by_one_then_joined_deltas_equal_whole_decode(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_near_the_words(kind))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.feed([token_id]) for token_id in ids) + detokenizer.flush()
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    if text != whole:  # a row of bytes that is not UTF-8: characters in it that are whole stay
        assert tokenizer.pieces.byte_fallback
        assert "\ufffd" in text
        assert (len(text), text.count("\ufffd")) < (len(whole) + 1, whole.count("\ufffd"))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_given_emitted_ids_when_rebuilt_then_the_rest_of_the_text_is_the_same(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_near_the_words(kind))
    cut = data.draw(st.integers(0, len(ids)))
    whole, rebuilt = Detokenizer(tokenizer), Detokenizer(tokenizer)
    for token_id in ids[:cut]:
        whole.feed([token_id])
    rebuilt.feed(ids[:cut])
    assert whole.feed(ids[cut:]) + whole.flush() == rebuilt.feed(ids[cut:]) + rebuilt.flush()


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_given_any_text_when_streamed_then_no_delta_holds_half_a_character(text: str) -> None:
    tokenizer = tokenizer_of("byte_level")
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.feed([token_id]) for token_id in tokenizer.encode(text)]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""


def test_given_a_character_cut_short_when_flushed_then_a_replacement_character_comes() -> None:
    tokenizer = tokenizer_of("byte_level")
    first_bytes = tokenizer.encode("🎉")[:1]
    detokenizer = Detokenizer(tokenizer)
    if tokenizer.token_bytes(first_bytes[0]) == "🎉".encode():  # it was merged: take a lone lead byte
        first_bytes = [tokenizer.token_id("ð") or 0]
    assert detokenizer.feed(first_bytes) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("data", "deltas", "rest"),
    [
        ("你é.".encode(), ["", "", "你", "", "é", "."], ""),
        ("🎉".encode()[:3], ["", "", ""], "\ufffd\ufffd\ufffd"),
        (b"a\xe4\xbd\xe4\xbd\xa0", ["a", "", "", "\ufffd\ufffd", "", "你"], ""),
        (b"\xffa\xc3(", ["\ufffd", "a", "", "\ufffd("], ""),
        (b"\xe0\x80\xf0", ["", "\ufffd\ufffd", ""], "\ufffd"),
    ],
)
def test_given_byte_tokens_in_a_row_when_fed_then_each_character_comes_as_soon_as_it_is_whole(
    data: bytes, deltas: list[str], rest: str
) -> None:
    tokenizer = tokenizer_of("llama")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([tokenizer.token_id(f"<0x{byte:02X}>") or 0]) for byte in data] == deltas
    assert detokenizer.flush() == rest


def test_given_a_prompt_before_when_first_word_has_a_space_then_it_is_kept() -> None:
    tokenizer = tokenizer_of("llama")
    hello = tokenizer.token_id("▁hello") or 0
    assert Detokenizer(tokenizer).feed([hello]) == "hello"
    assert Detokenizer(tokenizer, after_prompt=True).feed([hello]) == " hello"


def test_given_a_decoder_of_another_kind_when_loaded_then_the_error_names_it(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_given_a_token_when_asked_for_bytes_then_they_are_its_own(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    expected = {"byte_level": "hello", "none": "▁hello"}.get(kind, " hello").encode()
    token = "hello" if kind == "byte_level" else "▁hello"
    assert tokenizer.token_bytes(tokenizer.token_id(token) or 0) == expected
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
