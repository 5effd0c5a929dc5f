"""Receipts and modes as data: what is written is read back, and nothing else is read."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.checkpoint import model_digest
from novainfer.entrypoints.saved_answer import read_answer
from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.mode import Mode
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash
from novainfer.sampling.params import SamplingParams

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

MODE = "cpu avx512bf16 cpu/native bfloat16 tp1 exact"
RECEIPT = Receipt(
    model="demo",
    model_digest="sha256:" + "0" * 64,
    mode=MODE,
    max_model_len=512,
    prompt_token_ids=(1, 2, 3),
    eos_token_ids=(0,),
    after_prompt=False,
    params=SamplingParams(
        n=2, max_tokens=9, seed=-5, logit_bias={7: -1.5}, allowed_token_ids=(7, 8), stop=("é\n",), top_p=0.1
    ),
    choices=(ChoiceReceipt(4, token_hash([1, 2, 3, 4]), "stop"), ChoiceReceipt(9, token_hash(range(9)), "length")),
)


def as_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(RECEIPT.to_json()))
    return data


def test_a_receipt_when_written_and_read_then_it_is_equal() -> None:
    assert Receipt.from_json(as_json()) == RECEIPT


def test_a_receipt_when_a_grammar_was_asked_for_then_it_is_told_and_one_from_before_there_were_any_is_read() -> None:
    receipt = replace(RECEIPT, params=replace(RECEIPT.params, grammar='start: "é\n"'))
    assert Receipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt
    older = as_json()
    del older["params"]["grammar"]
    assert Receipt.from_json(older) == RECEIPT


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_any_tokens_when_hashed_then_it_is_sha256_over_little_endian_int64(ids: list[int]) -> None:
    assert token_hash(ids) == "sha256:" + hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()


def paths(data: Any) -> list[tuple[Any, ...]]:
    """The way to every value of a JSON document."""
    if isinstance(data, dict):
        return [(key, *path) for key, value in data.items() for path in [(), *paths(value)]]
    if isinstance(data, list):
        return [(index, *path) for index, value in enumerate(data) for path in [(), *paths(value)]]
    return []


FLOATS = {"temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
WRONG = [
    (path, wrong)
    for path in paths(as_json())
    for wrong in ({}, "x" * 2000, -(2**70), 1.5, [[]], {"a": 1}, float("nan"))
    if path[:2] != ("params", "logit_bias")
    and not (wrong == 1.5 and path[-1] in FLOATS)
    and not (isinstance(wrong, str) and path[-1] == "grammar")
]


@pytest.mark.parametrize(("path", "wrong"), WRONG)
def test_a_receipt_when_any_value_is_of_another_kind_then_it_is_refused(path: tuple[Any, ...], wrong: Any) -> None:
    data = as_json()
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = wrong
    with pytest.raises(InvalidRequestError):
        Receipt.from_json(data)


NEEDED = [path for path in paths(as_json()) if isinstance(path[-1], str) and path[-1] not in ("7", "grammar")]


@pytest.mark.parametrize("path", NEEDED)
def test_a_receipt_when_a_field_is_missing_or_unknown_then_its_name_is_told(path: tuple[Any, ...]) -> None:
    data = as_json()
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    value = parent.pop(path[-1])
    with pytest.raises(InvalidRequestError, match=f"no field '{path[-1]}'"):
        Receipt.from_json(data)
    parent[path[-1]] = value
    parent["surprise"] = value
    with pytest.raises(InvalidRequestError, match="unknown field 'surprise'"):
        Receipt.from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("model", ""),
        ("model_digest", "sha256:" + "0" * 63),
        ("max_model_len", 0),
        ("prompt_token_ids", []),
        ("prompt_token_ids", [2**31]),
        ("prompt_token_ids", [True]),
        ("eos_token_ids", [0] * 1025),
        ("choices", []),
    ],
)
def test_a_receipt_when_a_value_is_out_of_bounds_then_its_name_is_told(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Receipt.from_json(as_json() | {name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", None), ("temperature", 1e-9), ("logit_bias", {"x": 1.0}), ("stop", "text"), ("max_tokens", 8)],
)
def test_a_receipt_when_a_parameter_is_wrong_then_it_is_refused(name: str, value: Any) -> None:
    data = as_json()
    data["params"][name] = value
    with pytest.raises(InvalidRequestError):
        Receipt.from_json(data)


def test_files_with_receipts_when_read_then_each_form_gives_them() -> None:
    data = as_json()
    whole = {"object": "text_completion", "choices": [{"index": 0, "text": "a\u2028data: b"}]}
    stream = [whole, whole | {"receipt": data}]
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in stream) + ": keep-alive\n\ndata: [DONE]\n\n"
    assert read_answer(json.dumps(data)).receipts == [RECEIPT]
    assert read_answer(json.dumps(whole | {"receipt": data}, ensure_ascii=False)).receipts == [RECEIPT]
    assert read_answer(json.dumps(whole | {"receipts": [data, None]})).receipts == [RECEIPT, None]
    assert read_answer(events).receipts == [RECEIPT]


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"object": "x"}', '{"receipt": null}', "data: [DONE]"])
def test_a_file_without_a_receipt_when_read_then_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        read_answer(text)


def test_a_mode_when_written_and_parsed_then_it_is_equal_and_nothing_else_is_one() -> None:
    assert str(Mode.parse(MODE)) == MODE
    gpu = Mode(
        device="cuda",
        hardware="NVIDIA H200 (SXM)",
        kernel_backend="triton",
        model_backend="native",
        dtype="float16",
        tensor_parallel_size=8,
        is_exact=False,
    )
    assert str(gpu) == "cuda NVIDIA-H200-SXM triton/native float16 tp8 best-effort"
    assert str(Mode.parse(str(gpu))) == str(gpu)
    quantised = MODE.replace("bfloat16", "bfloat16 int8")
    assert str(Mode.parse(quantised)) == quantised
    assert (Mode.parse(quantised).quantization, Mode.parse(MODE).quantization) == ("int8", "none")
    assert Mode.parse(str(gpu).replace("float16", "float16 fp8")).asked_quantization == "fp8"
    for types, quantization in (("bfloat16 kv-int8", "none"), ("bfloat16 gptq-int4 kv-int8", "gptq-int4")):
        parsed = Mode.parse(MODE.replace("bfloat16", types))
        assert str(parsed) == MODE.replace("bfloat16", types)
        assert (parsed.quantization, parsed.kv_cache_dtype) == (quantization, "int8")
    assert Mode.parse(MODE).kv_cache_dtype == "auto"
    unknown = MODE.replace("bfloat16", "bfloat16 int3")
    for wrong in (
        "",
        MODE + " ",
        unknown,
        MODE.replace("bfloat16", "bfloat16 kv-int4"),
        MODE.replace("bfloat16", "bfloat16 kv-int8 int8"),
        MODE.replace("tp1", "tp0"),
        MODE.replace("exact", "sure"),
        MODE.replace("/", ""),
    ):
        with pytest.raises(ConfigError):
            Mode.parse(wrong)


def test_a_checkpoint_when_anything_that_decides_tokens_changes_then_so_does_its_digest(tmp_path: Path) -> None:
    def write(files: dict[str, str]) -> str:
        for old in tmp_path.iterdir():
            old.unlink()
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return model_digest(tmp_path)

    files = {"config.json": "{}", "a.safetensors": "one", "b.safetensors": "two"}
    expected = hashlib.sha256(b"config.json\x002\0{}a.safetensors\x003\0oneb.safetensors\x003\0two").hexdigest()
    assert write(files) == write(files | {"README.md": "x"}) == f"sha256:{expected}"
    changed = [copy.copy(files) for _ in range(4)]
    changed[0]["config.json"] = "{ }"
    changed[1]["b.safetensors"] = "twO"
    changed[2] |= {"a.safetensors": "onet", "b.safetensors": "wo"}
    changed[3]["c.safetensors"] = changed[3].pop("b.safetensors")
    assert len({write(files), *map(write, changed)}) == 5
    with pytest.raises(ConfigError, match="no safetensors"):
        write({"config.json": "{}"})
    with pytest.raises(ConfigError, match="cannot be read"):
        write({"a.safetensors": "one"})
