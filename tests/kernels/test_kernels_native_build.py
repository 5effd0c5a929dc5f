"""Building the native kernels: many processes at once, no compiler, a broken one, the choice of an instruction set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu_backend import CpuBackend
from kernels.native import build
from kernels.native.library import load_library

pytestmark = pytest.mark.stage0

USE_WITHOUT_LIBRARY = """
import logging, torch
logging.basicConfig()
from kernels.cpu_backend import CpuBackend
backend = CpuBackend()
assert backend.isa is None
weight, x = torch.randn(5, 3), torch.randn(4, 3)
assert torch.allclose(backend.pack_linear(weight)(x), x @ weight.T, atol=1e-5)
assert backend.pack_linear(weight.bfloat16())(x.bfloat16(), torch.float32).dtype == torch.float32
assert backend.allocate_kv_cache(2, 16, 1, 32, torch.float32, torch.device("cpu"))[0].dim() == 4
assert backend.rms_norm(x, torch.ones(3), 1e-6).shape == x.shape
"""


def _environment(cache: Path, **changes: str) -> dict[str, str]:
    root = str(Path(build.__file__).parents[2])
    return {**os.environ, "NOVAINFER_CACHE_DIR": str(cache), "PYTHONPATH": root, **changes}


def test_two_processes_when_building_at_once_then_one_library_and_no_leftovers(tmp_path: Path) -> None:
    code = "from kernels.native.build import supported_isas; print(supported_isas()[-1])"
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=_environment(tmp_path), stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["portable"] * 2
    names = {path.name for path in tmp_path.glob("native/*/*")}
    assert names == {"libnova-probe.so", "probe.lock"}


def test_no_compiler_when_backend_is_made_then_one_warning_and_torch_results(tmp_path: Path) -> None:
    environment = _environment(tmp_path, PATH="/nonexistent", CXX="/nonexistent/g++")
    result = subprocess.run(
        [sys.executable, "-c", USE_WITHOUT_LIBRARY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("native CPU kernels are not available") == 1
    assert "no C++ compiler found" in result.stderr


def test_no_compiler_when_there_is_a_folder_of_built_ones_then_they_are_used_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    folder = build.library_path("probe").parents[1]
    code = "from kernels.native.build import library_path; print(library_path('probe'), library_path('portable'))"
    environment = _environment(
        tmp_path / "cache", PATH="/nonexistent", CXX="/nonexistent/g++", NOVAINFER_KERNEL_DIR=str(folder)
    )
    wanted = [str(build.library_path(name)) for name in ("probe", "portable")]
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout.split() == wanted, result.stderr
    assert not (tmp_path / "cache").exists()


def test_broken_compiler_when_building_then_error_names_it_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-g++"
    compiler.write_text("#!/bin/sh\necho internal compiler error >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NOVAINFER_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(build.NativeBuildError, match=r"broken-g\+\+ failed: internal compiler error"):
        build.library_path("portable")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_compiler_that_does_not_know_the_best_instruction_set_when_loaded_then_the_next_one(tmp_path: Path) -> None:
    compiler = tmp_path / "old-g++"
    compiler.write_text("#!/bin/sh\necho unrecognized option >&2\nexit 1\n")
    compiler.chmod(0o755)
    best, *others = build.supported_isas()
    for name in ("probe", *others[:1]):
        library = build.library_path(name)
        copy = tmp_path / "native" / library.parent.name / library.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    code = "from kernels.native.library import load_library; print(load_library().isa)"
    environment = _environment(tmp_path, CXX=str(compiler))
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if others:
        assert result.stdout.strip() == others[0] != best, result.stderr
    else:
        assert "unrecognized option" in result.stderr


def test_cache_folder_that_is_a_file_when_building_then_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NOVAINFER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(build.NativeBuildError, match="cannot write"):
        build.library_path("portable")


def test_instruction_set_when_named_by_environment_then_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOVAINFER_CPU_ISA", "portable")
    assert CpuBackend().isa == "portable"
    assert CpuBackend(build.supported_isas()[0]).isa == build.supported_isas()[0]


def test_instruction_set_that_does_not_exist_when_loaded_then_build_error() -> None:
    with pytest.raises(build.NativeBuildError, match="does not run 'avx1024'"):
        load_library("avx1024")
