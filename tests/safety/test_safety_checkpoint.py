"""Checkpoints that somebody made to hurt: files that are not what they say, and code that comes along."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from novainfer.errors import UnsupportedModelError
from tests.parity.builders import build_checkpoint
from tests.parity.harness import load
from workers.checkpoint import read_json
from workers.weights import WeightReader, find_bad_tensor

pytestmark = pytest.mark.stage0

MUTANTS = 600
TENSORS = {
    "a": torch.arange(32, dtype=torch.float32).reshape(4, 8),
    "b": torch.ones(6, dtype=torch.bfloat16),
    "c": torch.zeros(2, 3, dtype=torch.float16),
}
NUMBERS = (-1, 0, 1, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, "8", None, [], True)
LENGTHS = (0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001)


def with_header(whole: bytes, change: Callable[[Any], None]) -> bytes:
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + size :]


def mutant(whole: bytes, rng: random.Random) -> bytes:
    """The file with its header's fields, its bits, its length or its end changed."""
    name, way = rng.choice(list(TENSORS)), rng.randrange(8)
    if way == 0:
        return whole[: rng.randrange(len(whole))]
    if way == 1:
        return rng.choice(LENGTHS).to_bytes(8, "little") + whole[8:]
    if way == 2:
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def change(header: Any) -> None:
        if way in (3, 4):
            header[name]["data_offsets"][rng.randrange(2)] = rng.choice(NUMBERS)
        elif way == 5:
            odd = [rng.choice(NUMBERS) for _ in range(rng.randint(0, 3))]
            header[name]["shape"] = rng.choice([odd, header[name]["shape"][::-1], [1, *header[name]["shape"]]])
        elif way == 6:
            header[name]["dtype"] = rng.choice(["F64", "F32", "I64", "U8", "BOOL", "F8_E4M3", "pickle", "", 5, None])
        else:
            other = rng.choice(list(TENSORS))
            header[name] = rng.choice([header[other], {}, None, [], {**header[name], "data_offsets": [0, 2**40]}])

    return with_header(whole, change)


def test_given_mutated_weights_when_read_then_they_have_the_shapes_that_are_wanted_or_are_refused(
    tmp_path: Path,
) -> None:
    save_file(TENSORS, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    rng, outcomes = random.Random(1), {"read": 0, "refused": 0}
    for number in range(MUTANTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(mutant(whole, rng) if number else whole)
        try:
            reader = WeightReader(folder)
            for name, tensor in TENSORS.items():
                found = reader.read(name, tuple(tensor.shape))
                assert found.shape == tensor.shape
                found.double().sum()  # touches every byte of it
            reader.finish()
            find_bad_tensor(folder)
            outcomes["read"] += 1
        except UnsupportedModelError:
            outcomes["refused"] += 1
        (folder / "model.safetensors").unlink()
    assert outcomes["refused"] > MUTANTS // 2
    assert outcomes["read"] > 1


CODE = """
import pathlib
pathlib.Path({ran!r}).touch()
from transformers import PretrainedConfig
class Stranger(PretrainedConfig):
    model_type = "stranger"
"""


@pytest.mark.parametrize("model_type", ["stranger", "qwen3"])
def test_given_a_checkpoint_with_code_when_loaded_then_the_code_is_not_run(tmp_path: Path, model_type: str) -> None:
    folder, ran = build_checkpoint("qwen3", tmp_path / "model"), tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(ran=str(ran)))
    auto_map = {"AutoConfig": "code.Stranger", "AutoModelForCausalLM": "code.Stranger"}
    config = read_json(folder, "config.json") | {"model_type": model_type, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    if model_type == "stranger":
        with pytest.raises(UnsupportedModelError):
            load(folder)
    else:
        load(folder)  # our own decoder
    assert not ran.exists()


class _Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.gguf", "model.safetensors"])
def test_given_weights_that_are_a_pickle_when_loaded_then_they_are_refused_and_not_unpickled(
    tmp_path: Path, family: str, name: str
) -> None:
    folder, ran = build_checkpoint(family, tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Payload(ran)))
    with pytest.raises(UnsupportedModelError):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_given_sound_weights_in_the_format_of_pickles_when_loaded_then_they_are_refused_all_the_same(
    tmp_path: Path, family: str
) -> None:
    folder = build_checkpoint(family, tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError):
        load(folder)
