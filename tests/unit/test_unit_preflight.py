"""What `novainfer serve` refuses before it starts anything: each in one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novainfer.entrypoints.cli import main
from novainfer.errors import ConfigError, EngineError, UnsupportedModelError, words_of
from novainfer.text.preflight import check_text_files
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer

pytestmark = pytest.mark.unit

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **HEADS}))
    return tmp_path


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "flags", "words"),
    [
        (_remove("config.json"), [], "has no config.json"),
        (_remove("tokenizer.json"), [], "holds no tokenizer.json"),
        (_write("chat_template.jinja", b"\xff{{ x"), [], "chat_template.jinja is not UTF-8"),
        (_write("chat_template.jinja", b"{% for x in %}"), [], "the chat template cannot be compiled"),
        (_write("generation_config.json", b'{"temperature": -3}'), [], "generation_config.json: temperature must be"),
        (_write("tokenizer_config.json", b"["), [], "tokenizer_config.json cannot be read"),
        (_write("config.json", b'{"x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), [], "config.json cannot be read"),
        (_write("other", b""), ["--chat-template", "/nowhere"], "the chat template /nowhere cannot be read"),
        (_write("other", b""), ["-tp", "64"], "4 attention heads cannot be split evenly over 64 ranks"),
        (_write("other", b""), ["-tp", "3"], "4 attention heads cannot be split evenly over 3 ranks"),
    ],
)
def test_given_a_checkpoint_that_cannot_be_served_when_served_then_one_line_says_why_and_nothing_starts(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    flags: list[str],
    words: str,
) -> None:
    damage(folder)
    assert main(["serve", str(folder), "--port", "0", *flags]) == 2
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors.startswith("novainfer: "), errors
    assert errors.count("\n") == 1, errors
    assert words in errors


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -3),
        ("temperature", 1000.0),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", float("inf")),
        ("repetition_penalty", 0.0),
        ("suppress_tokens", [-1]),
        ("suppress_tokens", "x"),
        ("suppress_tokens", list(range(2049))),
        ("bad_words_ids", [["x"]]),
    ],
)
def test_given_a_default_that_no_request_could_have_when_looked_at_then_file_and_field_are_named(
    folder: Path, field: str, value: Any
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{field}"):
        check_text_files(folder)


def test_given_odd_ways_to_say_off_when_looked_at_then_they_are_fine(folder: Path, caplog: Any) -> None:
    values = {"temperature": 1e-9, "top_k": -1, "top_p": None, "min_p": 0, "num_beams": 1, "typical_p": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(values))
    check_text_files(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": -1, "top_k": 50.0}))
    check_text_files(folder)
    assert Tokenizer.load(folder).generation_defaults.numbers == {"temperature": 0.0}
    assert not caplog.records


def test_given_fields_without_an_equivalent_when_looked_at_then_one_warning_names_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"num_beams": 4, "no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2], [3]], "suppress_tokens": [5]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    check_text_files(folder)
    (record,) = caplog.records
    assert "no_repeat_ngram_size, num_beams, bad_words_ids: not supported" in record.getMessage()
    assert Tokenizer.load(folder).generation_defaults.banned_token_ids == (5, 3)


def test_given_no_template_when_looked_at_then_it_is_no_fault(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    check_text_files(folder)


def test_given_errors_when_put_into_words_then_they_have_one_line_and_only_surprises_a_class() -> None:
    assert words_of(UnsupportedModelError("no\n\n  such\nmodel")) == "no such model"
    assert words_of(ValueError("a\nb")) == "ValueError: a b"
    assert words_of(KeyError()) == "KeyError"
    assert words_of(EngineError()) == "EngineError"
