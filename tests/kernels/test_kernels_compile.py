"""The Triton kernels compile for a GPU, also where there is none: the interpreter accepts more than the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.stage0


def probe(folder: Path, *arguments: str) -> Any:
    """What `compile_probe` prints."""
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "error", "-m", "tests.kernels.compile_probe", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=root, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_steps_of_any_size_when_launched_then_no_kernel_is_compiled_anew(tmp_path: Path) -> None:
    versions = probe(tmp_path, "versions")
    # With an activation and without; few rows, where it is taken behind the sum of the chunks, and many.
    assert versions.pop("_linear_kernel") == 3
    assert versions.pop("_add_chunks_kernel") == 2
    assert versions == dict.fromkeys(versions, 1)
    assert {"_prefill_kernel", "_decode_kernel", "_merge_kernel", "_list_kernel", "_rms_norm_kernel"} <= versions.keys()


def test_every_kernel_compiles_for_hopper_and_exact_attention_uses_one_instruction(tmp_path: Path) -> None:
    instructions = probe(tmp_path)
    # Decode's 16 rows and prefill's 32 give the same bits because both go through this instruction and never wgmma.
    assert instructions["_decode_kernel"] == instructions["_prefill_kernel"] == ["mma.sync.aligned.m16n8k16"]
    assert all("wgmma" in name for name in instructions["_prefill_kernel fast"])
    # Few rows and many have tiles of 64 and 128 rows, for which there is one instruction; fp8 has its own.
    wgmma = "wgmma.mma_async.sync.aligned.m64n64"
    assert instructions["_linear_kernel"] == [f"{wgmma}k16.f32.bf16.bf16", f"{wgmma}k32.f32.e4m3.e4m3"]
    assert instructions.keys() == {
        "_linear_kernel",
        "_add_chunks_kernel",
        "_round_rows_kernel",
        "_input_kernel",
        "_decode_kernel",
        "_merge_kernel",
        "_list_kernel",
        "_prefill_kernel",
        "_prefill_kernel fast",
        "_store_kernel",
        "_rotary_kernel",
        "_rms_norm_kernel",
        "_act_mul_kernel",
        "maxima_kernel",
        "bound_kernel",
        "round_kernel",
        "gather_kernel",
        "choice_kernel",
        "_slice_kernel",
        "_best_kernel",
        "_inputs_kernel",
        "_append_kernel",
    }
