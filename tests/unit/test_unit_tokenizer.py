"""Loading a checkpoint's tokenizer and what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from novainfer.checkpoint import resolve_checkpoint
from novainfer.errors import ConfigError
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import CHATML, write_tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


def write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def test_given_text_when_encoded_and_decoded_then_it_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "héllo 你好 🎉\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_given_special_tokens_in_text_when_encoded_then_they_are_single_ids_and_skipped(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert ids[0] in tokenizer.special_ids
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


def test_given_a_post_processor_when_special_tokens_are_asked_for_then_bos_comes_first(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<|endoftext|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert tokenizer.encode("the quick brown fox") == [bos, *plain]
    assert len(plain) > 2


def test_given_eos_in_every_file_when_loaded_then_all_are_known(folder: Path) -> None:
    own = Tokenizer.load(folder).token_id("<|im_end|>")
    assert Tokenizer.load(folder).eos_token_ids == (own,)
    write(folder / "config.json", {"eos_token_id": 7})
    assert Tokenizer.load(folder).eos_token_ids == (7, own)
    write(folder / "generation_config.json", {"eos_token_id": [0, own]})
    assert Tokenizer.load(folder).eos_token_ids == (0, own)


def test_given_generation_defaults_when_loaded_then_those_of_sampling_count(folder: Path) -> None:
    write(folder / "generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": None, "a": 1})
    assert Tokenizer.load(folder).generation_defaults.numbers == {"temperature": 0.6, "top_k": 20}
    write(folder / "generation_config.json", {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1})
    assert Tokenizer.load(folder).generation_defaults.numbers == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_given_templates_in_each_form_when_loaded_then_the_jinja_file_wins(folder: Path) -> None:
    assert Tokenizer.load(folder).chat_templates == {"default": CHATML}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.load(folder).chat_templates == {"default": CHATML, "tool_use": "b"}
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.load(folder).chat_templates == {"default": "a", "tool_use": "b"}
    write(folder / "tokenizer_config.json", {"chat_template": "c", "eos_token": {"content": "<|im_end|>"}})
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.chat_templates, tokenizer.special_tokens) == ({"default": "c"}, {"eos_token": "<|im_end|>"})


def test_given_a_plain_token_named_special_when_loaded_then_it_is_special(folder: Path) -> None:
    write(folder / "tokenizer_config.json", {"eos_token": "hello"})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.token_id("hello") in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("hello")) == ""


def test_given_only_a_slow_tokenizer_when_loaded_then_the_error_says_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match="save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_given_a_broken_file_when_loaded_then_the_error_names_it(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(folder)


def test_given_a_name_when_resolved_then_folders_come_first_and_nonsense_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_checkpoint(str(folder)) == folder
    monkeypatch.chdir(folder)
    for name in ("no/such/folder", "../x", "a b", "/nowhere", ""):
        with pytest.raises(ConfigError):
            resolve_checkpoint(name)


def test_given_a_hub_id_when_the_hub_is_offline_then_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="could not be had from the hub"):
        resolve_checkpoint("someone/not-cached-here")
