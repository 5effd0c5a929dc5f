"""The GPU benchmark, rehearsed: every stage at toy sizes in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.stage0

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_benchmark_when_rehearsed_then_every_stage_has_its_rows(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.gpu", "--toy", "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    who = {stage: {row["who"] for row in rows if row["stage"] == stage} for stage in {row["stage"] for row in rows}}
    assert who["attention"] == {"novainfer", "torch sdpa"}
    assert who["gemm"] == {"torch", *(f"novainfer{kind}" for kind in ("", " int8", " int4", " fp8"))}
    assert who["job"] == {"normal", "deterministic"}
    assert set(who) == {"env", "correct", "attention", "gemm", "job"}


def test_an_unknown_stage_when_asked_for_then_it_is_refused() -> None:
    command = [sys.executable, "-m", "bench.gpu", "--toy", "--stages", "env,magic"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "unknown stages: magic" in done.stderr
