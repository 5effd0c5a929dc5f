"""Tokens that stand beside tokenizer.json alone: the ids and the flags that transformers' own tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from novainfer.errors import ConfigError
from novainfer.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

CONFIG, OLDER, NAMES = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
TEXT = "hello <old> cat <a> x<b>y <e> <img><v> scat <p> <s> <x>."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes and one word (256), with one token added (257) that is not special."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "hello"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<old>", lstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, **files: dict[str, Any]) -> None:
    for name, values in {"config": {}, **files}.items():
        path = folder / {"config": CONFIG, "older": OLDER, "names": NAMES}[name]
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "config" else {}
        path.write_text(json.dumps(kind | values), encoding="utf-8")


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"added_tokens_decoder": {"259": added("<b>"), "258": added("<a>", lstrip=True)}}},
        {"config": {"added_tokens_decoder": {"258": added("<a>", special=False, rstrip=True)}, "eos_token": "<a>"}},
        {"config": {"added_tokens_decoder": {"258": added("cat", special=False, single_word=True, normalized=True)}}},
        {"config": {"added_tokens_decoder": {"256": added("hello"), "257": added("<old>", rstrip=True)}}},
        {"config": {"additional_special_tokens": ["<a>", "<b>"], "eos_token": "<e>"}},
        {"config": {"extra_special_tokens": ["<b>", "<a>"], "pad_token": "<p>", "sep_token": "<s>"}},
        {"config": {"extra_special_tokens": {"image_token": "<img>"}, "video_token": "<v>", "eos_token": "<b>"}},
        {"config": {"eos_token": {"__type": "AddedToken", **added("<e>", lstrip=True)}}},
        {"config": {"eos_token": "<old>"}},
        {"older": {"<a>": 258, "<b>": 259}, "names": {"eos_token": "<b>"}},
        {
            "config": {"eos_token": "<x>"},
            "names": {"eos_token": added("<b>", lstrip=True), "additional_special_tokens": ["<a>"]},
        },
        {
            "config": {"added_tokens_decoder": {"258": added("<a>")}, "eos_token": "<a>"},
            "older": {"<b>": 400},
            "names": {"eos_token": "<b>", "pad_token": "<p>"},
        },
        {"config": {"added_tokens_decoder": {"258": added("<a>")}, "split_special_tokens": True}},
    ],
)
def test_given_tokens_beside_the_tokenizers_own_when_loaded_then_all_is_as_in_transformers(
    files: dict[str, dict[str, Any]], folder: Path
) -> None:
    write(folder, **files)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert (ours.special_ids, ours.vocab_size) == (special, len(theirs))
    ids = list(range(250, len(theirs)))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"config": {"added_tokens_decoder": {"300": added("<a>")}, "eos_token": "<a>"}}, CONFIG),
        ({"config": {"added_tokens_decoder": {"258": added("<old>")}}}, CONFIG),
        ({"config": {"added_tokens_decoder": {"258": added("<a>"), "259": added("<a>")}}}, CONFIG),
        ({"older": {"<a>": 259}}, OLDER),
    ],
)
def test_given_an_id_that_the_token_does_not_get_when_loaded_then_it_is_as_in_transformers_and_the_file_is_named(
    files: dict[str, dict[str, Any]], source: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, **files)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert [record.message for record in caplog.records if f"{source} gives the token" in record.message]


@pytest.mark.parametrize(("vocab_size", "read"), [(257, ""), (258, ""), (259, "<a>"), (261, "<a><b><e>")])
def test_given_tokens_behind_the_models_last_one_when_loaded_then_their_text_is_as_any_other(
    folder: Path, vocab_size: int, read: str
) -> None:
    decoder = {"258": added("<a>"), "259": added("<b>")}
    write(folder, config={"added_tokens_decoder": decoder, "pad_token": "<b>", "eos_token": "<e>"})
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}), encoding="utf-8")
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("<a><b><e>")
    assert [i for i in ids if i > 257] == list(range(258, 258 + read.count("<")))
    assert max(ids) < max(vocab_size, 258)
    assert tokenizer.decode(tokenizer.encode("<b> <e>" if read != "<a><b><e>" else "b")).strip() in ("<b> <e>", "b")
    assert tokenizer.eos_token_ids == ((260,) if "<e>" in read else ())


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": added("<a>")}},
        {"added_tokens_decoder": {"258": "<a>"}},
        {"added_tokens_decoder": {"258": {"content": 7}}},
        {"extra_special_tokens": "<a>"},
        {"additional_special_tokens": [7]},
        {"model_specific_special_tokens": ["<a>"]},
    ],
)
def test_given_what_is_no_token_when_loaded_then_refused(config: dict[str, Any], folder: Path) -> None:
    write(folder, config=config)
    with pytest.raises(ConfigError, match=r"added tokens of .* cannot be read"):
        Tokenizer.load(folder)
