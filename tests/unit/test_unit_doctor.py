"""What the doctor says of installed packages and of memory."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from novainfer.config import MIB, ServeConfig
from novainfer.entrypoints import doctor
from novainfer.entrypoints.options import build_config

pytestmark = pytest.mark.unit


def test_a_package_that_is_too_old_when_the_doctor_looks_then_it_fails_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [
        "msgpack<2,>=1.2.3",
        "starlette>=1.3.1",
        "absent>=1; platform_system == 'Nowhere'",
        "openai>=2; extra == 'test'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    versions = {"msgpack": "1.2.2", "starlette": "1.3.1+local"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    verdict = doctor.packages(ServeConfig())
    assert (verdict.status, verdict.finding) == (doctor.FAIL, "msgpack 1.2.2")
    assert verdict.fix == "pip install 'msgpack<2,>=1.2.3'"
    versions["msgpack"] = "1.2.10"
    assert doctor.packages(ServeConfig()).status == doctor.OK


def test_this_installation_when_the_doctor_looks_then_every_package_is_new_enough() -> None:
    assert doctor.packages(ServeConfig()).status == doctor.OK


def test_a_checkout_that_is_not_installed_when_the_doctor_looks_then_it_only_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert doctor.packages(ServeConfig()).status == doctor.WARN


def test_the_kv_cache_when_the_doctor_looks_at_memory_then_it_tells_what_tokens_take() -> None:
    vectors = 2 * 6 * 2  # keys and values, layers, heads
    widths = (("auto", "auto", 128), ("float32", "auto", 256), ("auto", "int8", 68), ("auto", "fp8", 64))
    for dtype, kv_cache_dtype, width in widths:
        config = build_config({"dtype": dtype, "kv_cache_dtype": kv_cache_dtype})
        expected = f"1000 tokens of the KV cache about {1000 * vectors * width / MIB:.1f} MiB"
        assert doctor.memory(config).finding.endswith(expected)


def test_a_checkpoint_that_does_not_tell_its_sizes_when_the_doctor_looks_at_memory_then_it_says_nothing_of_tokens(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    assert "tokens" not in doctor.memory(build_config({"model": str(tmp_path)})).finding


def test_a_checkpoint_of_8_bit_numbers_when_the_doctor_looks_at_memory_then_they_count_as_wide_as_they_become(
    tmp_path: Path,
) -> None:
    tensors = {"a": torch.zeros(2**20, dtype=torch.float8_e4m3fn), "b": torch.zeros(2**20, dtype=torch.half)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 9)
    assert 4 * MIB < doctor._weights_bytes(build_config({"model": str(tmp_path)})) < 4 * MIB + 1000
