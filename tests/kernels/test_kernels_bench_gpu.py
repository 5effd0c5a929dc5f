"""The GPU benchmark, rehearsed: every stage at toy sizes in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import gpu, tune_gpu
from bench.gpu import STAGES
from bench.gpu_clock import Clock
from bench.gpu_run import Run
from bench.tune_gpu import questions
from kernels import triton_tuning
from kernels.triton_tuning import forced, launch_options, read_table
from tests.kernels.conftest import DEVICE

TritonError = pytest.importorskip("triton.errors").TritonError  # an Exception, no RuntimeError

pytestmark = pytest.mark.stage0

ROOT = Path(__file__).resolve().parents[2]
QUICKLY = (sys.executable, "-m", "tests.interpreter")
ALL_KEYS = [question.key for question in questions(torch.device("cpu"), is_toy=True)]


def test_the_gpu_benchmark_when_rehearsed_then_every_stage_has_its_rows(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [*QUICKLY, "bench.gpu", "--toy", "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    who = {stage: {row["who"] for row in rows if row["stage"] == stage} for stage in {row["stage"] for row in rows}}
    ours = {"novainfer", "novainfer, fp8 KV", "novainfer, with its list"}
    assert who["attention"] == {*ours, "torch sdpa", "torch flex"}
    assert who["rows"] == {"novainfer", "novainfer, one launch", "novainfer, in parts", "torch"}
    assert who["prefill"] == {"novainfer", "novainfer deterministic", "torch sdpa", "torch flex"}
    assert who["sampler"] == {"novainfer", "torch sort", "torch softmax"}
    assert who["gemm"] == {"torch", *(f"novainfer{kind}" for kind in ("", " int8", " int4", " fp8"))}
    assert who["job"] == {"normal", "deterministic"}
    assert who["quantized"] == {"fp8"}
    assert who["transformers"] <= {"transformers (sdpa, greedy)", "transformers (paged|sdpa, greedy)"}  # by its version
    assert all(row["tokens_per_second"] > 0 for row in rows if row["stage"] in ("job", "quantized", "transformers"))
    # Two sequences of six tokens, of which the first decode computes the seventh, and the second is timed.
    assert {row["context"] for row in rows if row["stage"] in ("job", "quantized")} == {8}
    jobs = [row for row in rows if row["stage"] in ("job", "quantized")]
    assert all(row["of_roofline"] * row["step_ms"] == pytest.approx(row["roofline_ms"]) for row in jobs)
    assert {row["what"] for row in rows if row["stage"] == "files"} == {"tiny"}
    assert set(who) == {*STAGES, "files"}


def test_calls_that_fail_when_compared_then_they_are_left_out_unless_they_are_ours() -> None:
    def fail() -> None:
        raise TritonError("no room")

    clock = Clock(torch.device("cpu"))
    assert set(clock.compare({"novainfer": [lambda: None], "others": [fail]})) == {"novainfer"}
    with pytest.raises(TritonError):
        clock.compare({"novainfer int8": [fail], "others": [lambda: None]})


def test_stages_when_the_time_is_up_then_they_are_named_as_left_out(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--toy",
        "--stages",
        "env,job",
        "--minutes",
        "0",
        "--output",
        str(result),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert {row["who"] for row in json.loads(result.read_text())["rows"]} == {"left out: the time is up"}


def test_a_stage_that_fails_when_run_then_the_table_says_so_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(run: Run) -> None:
        raise SystemExit("no such luck")

    monkeypatch.setitem(gpu._STAGES, "env", fail)
    monkeypatch.setitem(gpu._STAGES, "job", lambda run: run.add("job", "some", "normal", seconds=1.0))
    path = tmp_path / "result.json"
    assert gpu.main(["--toy", "--stages", "env,job", "--output", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["stage"], row["who"]) for row in rows] == [
        ("env", "failed: SystemExit: no such luck"),
        ("job", "normal"),
    ]


def test_a_table_of_launches_when_made_then_the_kernels_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    command = [*QUICKLY, "bench.tune_gpu", "--toy", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len(set(ALL_KEYS)) == len(ALL_KEYS)
    asked = [line.split(":")[0] for line in done.stdout.splitlines()[:-1]]
    assert asked == ALL_KEYS[::6]
    assert set(read_table(path)) <= set(asked)


def answered(key: str, candidates: tuple[tuple[int, int], ...] = ((4, 5), (4, 3))) -> tune_gpu.Question:
    return tune_gpu.Question(key, lambda: [lambda: None], candidates)


def test_a_table_when_it_is_there_then_what_was_not_asked_stays_and_what_is_no_question_goes(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"choices": {"decode a=1": [8, 2], "decode b=1": [8, 2], "gone": [8, 2]}}))
    table = tune_gpu.Table(path, "some GPU", ["decode a=1", "decode b=1", "linear"])
    assert table.choices == {"decode a=1": (8, 2), "decode b=1": (8, 2)}
    table.answer("decode a=1", None)
    assert read_table(path) == {"decode b=1": (8, 2)}
    table.answer("linear", (4, 3))
    assert read_table(path) == {"decode b=1": (8, 2), "linear": (4, 3)}


def test_questions_when_one_fails_or_the_time_is_up_then_the_table_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def best(question: tune_gpu.Question, clock: Clock) -> tuple[int, int]:
        if question.key == "broken":
            raise TritonError("the device is lost")
        return question.candidates[-1]

    monkeypatch.setattr(tune_gpu, "_best", best)
    keys = ["decode", "broken", "linear"]
    table = tune_gpu.Table(tmp_path / "table.json", "some GPU", keys)
    asked, clock = [answered(key) for key in keys], Clock(torch.device("cpu"))
    assert tune_gpu.ask(asked, table, clock, float("inf")) == 0
    assert read_table(tmp_path / "table.json") == {"decode": (4, 3), "linear": (4, 3)}
    assert "broken: failed: TritonError: the device is lost" in capsys.readouterr().out
    assert tune_gpu.ask(asked[1:], table, clock, 0.0) == 1
    assert "the time is up; left out: broken, linear" in capsys.readouterr().out


def test_questions_when_some_are_asked_for_then_no_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_gpu, "_best", lambda question, clock: None)
    monkeypatch.setattr(tune_gpu, "_TOY_STRIDE", 1)
    asked: list[str] = []
    monkeypatch.setattr(tune_gpu.Table, "answer", lambda self, key, best: asked.append(key))
    toy = ["--toy", "--output", str(tmp_path / "table.json")]
    assert tune_gpu.main([*toy, "--only", "decode,linear bits=4"]) == 0
    assert asked
    assert asked == [key for key in ALL_KEYS if key.startswith(("decode", "linear bits=4"))]
    with pytest.raises(SystemExit):
        tune_gpu.main([*toy, "--only", "magic"])
    assert "no question is named so" in capsys.readouterr().err


@pytest.mark.parametrize("question", questions(DEVICE, is_toy=True), ids=lambda question: question.key)
def test_a_question_when_its_calls_run_then_a_kernel_looks_its_key_up(
    question: tune_gpu.Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def table_key(kernel: str, features: dict[str, int]) -> str:
        found.append(real(kernel, features))
        return found[-1]

    real = triton_tuning.table_key
    calls = question.calls()
    monkeypatch.setattr(triton_tuning, "table_key", table_key)
    with forced({"some other": (1, 1)}):  # what is forced is looked up each time
        calls[0]()
    assert set(found) == {question.key}


def test_a_question_when_no_candidate_runs_then_the_default_stays(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise TritonError("out of resource")

    question = tune_gpu.Question("decode some=1", lambda: [fail], ((4, 5), (4, 3)))
    assert tune_gpu._best(question, Clock(torch.device("cpu"))) is None
    assert "decode some=1: no candidate runs, the default stays" in capsys.readouterr().out


def test_launches_when_looked_up_then_the_table_goes_before_the_default_and_what_is_forced_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(triton_tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some-GPU (80 GB)")
    (tmp_path / "nvidia-some-gpu-80-gb.json").write_text('{"choices": {"decode head_dim=128 itemsize=2": [8, 2]}}')
    for found in (triton_tuning._table_of, triton_tuning._chosen):
        found.cache_clear()
    try:
        features = {"itemsize": 2, "head_dim": 128}
        assert launch_options("decode", gpu, (4, 3), **features) == {"num_warps": 8, "num_stages": 2}
        assert launch_options("decode", torch.device("cpu"), (4, 3), **features) == {"num_warps": 4, "num_stages": 3}
        assert launch_options("prefill", gpu, (4, 3), **features) == {"num_warps": 4, "num_stages": 3}
        with forced({"decode head_dim=128 itemsize=2": (1, 1)}):
            assert launch_options("decode", gpu, (4, 3), **features) == {"num_warps": 1, "num_stages": 1}
        assert launch_options("decode", gpu, (4, 3), **features) == {"num_warps": 8, "num_stages": 2}
    finally:
        for found in (triton_tuning._table_of, triton_tuning._chosen):
            found.cache_clear()


def test_tables_that_ship_when_read_then_they_are_some() -> None:
    for path in triton_tuning.FOLDER.glob("*.json"):
        assert read_table(path)
    assert read_table(triton_tuning.table_path("no such GPU")) == {}


def test_a_table_with_launches_that_no_gpu_takes_when_read_then_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"choices": {"decode": [3, 2]}}')
    with pytest.raises(ValueError, match="no GPU takes"):
        read_table(path)


def test_an_unknown_stage_when_asked_for_then_it_is_refused() -> None:
    command = [sys.executable, "-m", "bench.gpu", "--toy", "--stages", "env,magic"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "unknown stages: magic" in done.stderr
