"""A config that is kept makes the same decoder as the one that transformers reads, without its import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backend import KernelBackend, select_backend
from novainfer.config import ModelConfig, ParallelConfig, ServeConfig
from tests.parity.builders import FAMILIES, build_checkpoint
from workers import kept_config
from workers.kept_config import KeptConfig, is_transformers_wanted, keep, kept_path, read_kept, tell_zygote
from workers.models import loader
from workers.models.base import CausalLM
from workers.tensor_parallel import TensorParallel

pytestmark = pytest.mark.stage0

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where configs are kept; the fixture's user has no kernels to build."""
    monkeypatch.setattr(kept_config, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "configs"


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return select_backend(CPU)


def load(folder: Path, kernels: KernelBackend, **options: Any) -> CausalLM:
    config = ModelConfig(model=str(folder), **options)
    return loader.load_model(config, tp=TensorParallel.single(), kernels=kernels, device=CPU)


def kept_for(folder: Path, **options: Any) -> KeptConfig | None:
    return read_kept(kept_path(folder, ModelConfig(**options)))


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(loader, "load_hf_config", refuse)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_when_loaded_again_then_transformers_is_not_asked_and_the_decoder_is_the_same(
    name: str, cache: Path, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(name, tmp_path / "model")
    first = load(folder, kernels)
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    without_transformers(monkeypatch)
    assert load(folder, kernels).spec == first.spec


@pytest.mark.parametrize("options", [{"weight_cache_gib": 0.0}, {"model_backend": "transformers"}])
def test_a_config_that_is_not_to_be_kept_when_loaded_then_it_is_neither_written_nor_read(
    options: dict[str, Any], cache: Path, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    load(folder, kernels, **options)
    assert not cache.exists()
    load(folder, kernels)
    assert kept_for(folder) is not None
    assert kept_for(folder, **options) is None


def test_a_config_when_it_changes_then_what_was_kept_is_not_used(
    cache: Path, kernels: KernelBackend, tmp_path: Path
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    assert load(folder, kernels).spec.max_position != 77
    change(folder, max_position_embeddings=77)
    assert kept_for(folder) is None
    assert load(folder, kernels).spec.max_position == 77
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", [(b"2", b"3"), (b"\n", b""), (b"}", b""), (b"llama", b"\xff")])
def test_a_damaged_file_when_found_then_transformers_is_asked_again(
    damage: tuple[bytes, bytes], cache: Path, kernels: KernelBackend, tmp_path: Path
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    spec = load(folder, kernels).spec
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes().replace(*damage))
    assert kept_for(folder) is None
    assert load(folder, kernels).spec == spec
    assert kept_for(folder) is not None


def test_a_config_that_says_something_else_once_it_was_written_when_loaded_then_not_kept(
    cache: Path, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loader.load_hf_config

    def lossy(*arguments: Any) -> Any:
        config = real(*arguments)
        config.to_dict = lambda: {"model_type": "llama", "hidden_size": 8}
        return config

    monkeypatch.setattr(loader, "load_hf_config", lossy)
    load(build_checkpoint("llama", tmp_path / "model"), kernels)
    assert not cache.exists()


def test_a_config_that_is_replaced_while_it_is_read_then_not_kept(
    cache: Path, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = build_checkpoint("llama", tmp_path / "model"), loader.load_hf_config

    def replaced(*arguments: Any) -> Any:
        config = real(*arguments)
        change(folder, rms_norm_eps=1e-3)
        return config

    monkeypatch.setattr(loader, "load_hf_config", replaced)
    load(folder, kernels)
    assert not cache.exists()


def test_a_config_whose_own_type_would_be_another_one_when_loaded_as_some_type_then_not_kept(
    cache: Path, kernels: KernelBackend, tmp_path: Path
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        values.pop(name, None)
    (folder / "config.json").write_text(json.dumps(values | {"text_config": {"dtype": "bfloat16"}}))
    load(folder, kernels, dtype="float32")
    assert load(folder, kernels).spec.dtype == torch.float32


def test_a_config_with_code_of_its_own_when_it_is_read_then_neither_kept_nor_looked_for(
    cache: Path, kernels: KernelBackend, tmp_path: Path
) -> None:
    folder = build_checkpoint("llama", tmp_path / "model")
    change(folder, auto_map={})
    load(folder, kernels)
    assert not cache.exists()
    assert kept_path(folder, ModelConfig()) is None


@pytest.mark.parametrize("text", [None, "[1]", "{", "\xff", "[" * 10**5 + "]" * 10**5])
def test_a_checkpoint_without_a_config_when_asked_for_then_none_and_no_error(
    text: str | None, cache: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert kept_path(tmp_path, ModelConfig()) is None
    assert read_kept(None) is None


def test_many_configs_when_kept_then_the_oldest_go(cache: Path) -> None:
    paths = [cache / f"{number}.json" for number in range(40)]
    for number, path in enumerate(paths):
        keep(path, {"number": number})
        os.utime(path, (number, number))
    assert sorted(cache.iterdir()) == sorted(paths[8:])
    assert vars(read_kept(paths[-1]) or object)["number"] == 39


def test_a_folder_that_cannot_be_written_when_kept_then_no_error(cache: Path) -> None:
    cache.parent.write_text("a file in its place")
    keep(cache / "1.json", {})
    assert read_kept(cache / "1.json") is None


def test_zygote_when_told_that_a_config_is_kept_then_it_does_not_import_transformers(
    cache: Path, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder, config = build_checkpoint("llama", tmp_path / "model"), ServeConfig()
    tell_zygote(folder, config)
    assert is_transformers_wanted()
    load(folder, kernels)
    tell_zygote(folder, config)
    assert not is_transformers_wanted()
    code = "import sys\nfrom workers.rank_zygote import import_all\nimport_all()\nprint('transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], env=os.environ, text=True) == "False\n"
    for other in ({"model": ModelConfig(weight_cache_gib=0.0)}, {"parallel": ParallelConfig(executor="null")}):
        tell_zygote(folder, config)
        tell_zygote(folder, replace(config, **other))  # type: ignore[arg-type]
        assert is_transformers_wanted()
    assert subprocess.check_output([sys.executable, "-c", code], env=os.environ, text=True) == "True\n"
