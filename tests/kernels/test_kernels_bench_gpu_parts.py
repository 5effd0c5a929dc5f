"""Parts of the GPU benchmark by themselves: which steps count, gaps between them, the clock, checkpoints, processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("triton")

from bench import gpu, gpu_jobs, gpu_kernels, gpu_roofline, gpu_run, make_checkpoint
from bench.gpu_clock import EAGER, Clock
from bench.gpu_jobs import Job, _steps_of
from bench.gpu_run import Run, folder_for
from bench.gpu_steps import NotDecodesError, Span, Step, Watch, covered, decodes, gap_figures, idle_gaps, longest_run
from bench.make_checkpoint import SHAPES
from kernels.linear.packing import pack_rounded, pack_whole
from kernels.linear.schemes import FLOAT8, INT4, INT8
from kernels.paged_attention.triton_decode import WorkList
from novainfer.protocol.columns import column
from novainfer.protocol.step import NewRow, StepPlan
from novainfer.sampling.params import SamplingParams

pytestmark = pytest.mark.stage0

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
list_of = WorkList.of
SCHEMES = {scheme.name: scheme for scheme in (INT8, INT4, FLOAT8)}  # that the Triton kernels have


def toy_run() -> Run:
    return Run(CPU, Clock(CPU), True, ("tiny",))


def new_row(row: int, prompt_len: int, num_computed: int = 0) -> NewRow:
    return NewRow(row, column([1]) * prompt_len, prompt_len, num_computed, [], SamplingParams(), 0)


def plan(new: list[NewRow], **counts: int) -> StepPlan:
    """counts: tokens of each row, by "r" and its number."""
    return StepPlan(0, 0, column([int(name[1:]) for name in counts]), column(counts.values()), new_rows=new)


def test_steps_when_one_computes_any_prompt_or_misses_a_sequence_then_it_is_no_decode() -> None:
    plans = [
        plan([new_row(0, 4), new_row(1, 3)], r0=4, r1=2),
        plan([], r0=1, r1=1),  # the last token of the second prompt
        plan([], r0=1, r1=1),
        plan([], r0=1),
        plan([new_row(1, 5, 4)], r0=1, r1=1),  # preempted, and all but one token found in the cache
        plan([], r0=1, r1=1),
        plan([], r0=1, r1=1),  # not answered yet
    ]
    steps = Watch(plans, [float(i) for i in range(6)]).steps(2)
    assert [step.is_decode for step in steps] == [False, False, True, False, False, True]
    assert [step.context for step in steps] == [3, 4, 5, 7, 6.5, 7.5]


def test_decodes_when_others_are_between_then_the_longest_run_is_timed_without_its_first() -> None:
    flags = [True, False, True, True, True, False, True, True]
    steps = [Step(flag, 10.0 + i, i * i / 10) for i, flag in enumerate(flags)]
    run = longest_run(steps)
    assert run == steps[2:5]
    found = decodes(run)
    assert found is not None
    assert (found.context, found.step_seconds) == (13.5, pytest.approx(0.6))
    assert found.p99_seconds == pytest.approx(0.7, abs=0.01)
    assert decodes(run[:1]) is None
    assert longest_run([replace(step, is_decode=False) for step in steps]) == []


def test_gaps_when_copies_run_between_two_steps_then_their_time_is_none() -> None:
    spans = [
        Span(0.0, 1.0, "_inputs_kernel"),
        Span(5.0, 6.0, "_append_kernel"),  # what stands still inside a step is no gap
        Span(6.5, 8.0, "Memcpy DtoH"),
        Span(7.0, 9.0, "Memcpy HtoD"),
        Span(11.0, 12.0, "_inputs_kernel"),
        Span(12.0, 13.0, "_append_kernel"),
        Span(13.0, 14.0, "_inputs_kernel"),
    ]
    assert idle_gaps(spans) == [2.5, 0.0]


def test_a_profile_when_read_then_its_first_steps_do_not_count() -> None:
    spans = []
    for i in range(40):
        start = 10.0 * i + (1000.0 if i < 10 else 2000.0)
        spans += [Span(start, start + 4, "_inputs_kernel"), Span(start + 4, start + 8, "_append_kernel")]
    figures = gap_figures(spans)
    assert figures == {"busy": pytest.approx(188 / 234), "gaps": 23, "gap_us_p50": 2.0, "gap_us_p99": 2.0}
    assert set(gap_figures([Span(0.0, 1.0, "gemm"), Span(1.0, 3.0, "gemm")])) == {"busy"}
    without_ends = [replace(span, name="gemm") if span.name == "_append_kernel" else span for span in spans]
    assert set(gap_figures(without_ends)) == {"busy"}


@pytest.mark.parametrize(
    ("spans", "share"), [([(0.0, 1.0), (1.0, 2.0)], 1.0), ([(0.0, 1.0), (0.5, 0.7), (3.0, 4.0)], 0.5)]
)
def test_spans_of_kernels_when_added_up_then_overlaps_count_once(
    spans: list[tuple[float, float]], share: float
) -> None:
    assert covered([Span(*span) for span in spans]) == pytest.approx(share)


class NoGraphs(Clock):
    """A clock on a GPU that captures none of some calls."""

    def __init__(self, refused: set[str]) -> None:
        super().__init__(CPU)
        self.is_toy = False
        self._refused = refused

    def wait(self) -> None:
        pass

    def _capture(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        if calls[0]() in self._refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return calls[0]

    def _seconds(self, run: Callable[[], object]) -> float:
        run()
        return 20e-6


def test_calls_that_no_graph_takes_when_timed_then_table_and_file_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = toy_run()
    for who, timing in NoGraphs({"b"}).compare({"a": [lambda: "a"], "b": [lambda: "b"]}).items():
        run.add_timing("gemm", "layer", who, timing)
    assert [row.get("how") for row in run.rows] == [None, EAGER]
    lines = [line for line in capsys.readouterr().out.splitlines() if "gemm" in line]
    assert [line.endswith(f"({EAGER})") for line in lines] == [False, True]


def test_a_checkpoint_when_drawn_by_more_threads_then_its_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for number, (threads, piece) in enumerate([(1, 1 << 30), (5, 1000)]):
        monkeypatch.setattr(make_checkpoint, "_THREADS", threads)
        monkeypatch.setattr(make_checkpoint, "_MOST_WRITTEN", piece)
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        make_checkpoint.make_checkpoint(TINY, tmp_path / str(number), seed=3)
        written.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    make_checkpoint.make_checkpoint(TINY, tmp_path / "other", seed=4)
    assert written[0] != (tmp_path / "other" / "model.safetensors").read_bytes()
    with safe_open(tmp_path / "0" / "model.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == dict(TINY.tensors())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    gate, up = found["model.layers.0.mlp.gate_proj.weight"], found["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(gate, up)
    assert gate.float().std() == pytest.approx(0.02, rel=0.05)
    assert sum(tensor.nbytes for tensor in found.values()) == TINY.weight_bytes()


def test_checkpoints_when_the_run_fails_then_their_files_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def fail(run: Run) -> None:
        folders.append(Path(run.checkpoint("tiny")))
        assert run.checkpoint("tiny") == str(folders[0])
        assert (folders[0] / "config.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu._STAGES, "job", fail)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--toy", "--stages", "job"])
    assert not folders[0].exists()


def test_a_checkpoint_when_memory_is_short_then_it_lies_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_MEMORY_FOLDER", tmp_path)
    assert folder_for(1) == tmp_path
    assert folder_for(1 << 60) is None
    monkeypatch.setattr(gpu_run, "_MEMORY_FOLDER", tmp_path / "none")
    assert folder_for(1) is None


def test_a_process_when_it_fails_or_takes_too_long_then_the_reason_stands_for_its_figures() -> None:
    run = toy_run()
    python = [sys.executable, "-c"]
    assert run.figures_of([*python, "print('loading'); print('{\"seconds\": 2.0}')"], 60) == {"seconds": 2.0}
    assert run.figures_of([*python, "import time; time.sleep(60)"], 0.1) == "left out: not done in 0 s"
    assert run.figures_of([*python, "raise SystemExit(3)"], 60) == "left out: failed (3)"


@pytest.mark.parametrize(
    ("words", "unit", "status", "row"),
    [
        ("24 pairs so far\\n48 pairs, 0 differences (torch 2)", "pairs", 0, ("passed", 48)),
        ("24 pairs so far", "pairs", None, ("stopped after 3 s", 24)),
        ("..s....  [ 50%]\\n....", "tests", None, ("stopped after 3 s", 10)),
        ("..s.  [100%]\\n3 passed, 1 skipped in 2.00s", "tests", 0, ("passed", 3)),
        ("0 pairs, 0 differences", "pairs", 0, None),
        ("loading ...", "tests", None, None),
        ("48 pairs, 1 differences", "pairs", 1, None),
    ],
)
def test_a_check_when_it_ends_or_is_stopped_then_success_is_what_was_checked(
    words: str, unit: str, status: int | None, row: tuple[str, int] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    run = toy_run()
    then = "sleep 600" if status is None else f"exit {status}"
    command = ["sh", "-c", f"printf '%b\\n' '{words}'; {then}"]
    if row is None:
        with pytest.raises(SystemExit, match="nothing was checked" if status != 1 else r"failed \(1\)"):
            run.check("exact", "some", command, unit, 3.0)
    else:
        run.check("exact", "some", command, unit, 3.0)
        assert [(found["who"], found[unit]) for found in run.rows] == [row]
    assert run.num_checked == (row[1] if row else 0)
    assert words.split("\\n")[0] in capfd.readouterr().out


def test_a_process_when_it_is_stopped_then_those_that_it_began_are_too(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    toy_run().figures_of(["sh", "-c", f"sleep 600 & echo $! > {path}; wait"], 3.0)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(path.read_text())).wait(60)


@pytest.mark.parametrize("stages", ["sanitizer", "env,exact"])
def test_checks_that_were_left_out_when_nothing_else_was_checked_then_it_is_no_success(stages: str) -> None:
    assert gpu.main(["--toy", "--stages", stages]) == 1


def test_tests_of_the_kernels_when_collected_then_none_is_of_the_cpus_which_want_a_compiler() -> None:
    command = [*gpu.kernel_tests(is_toy=False), "--collect-only"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert [test for test in collected if "triton" in test]
    assert not [test for test in collected if "cpu" in test]


def test_steps_of_a_job_when_prompts_are_done_then_their_rate_ends_there() -> None:
    flags = [False, False, True, True, True]
    steps = [Step(flag, 100.0 + i, 10.0 + (2.0 if i < 2 else 0.5) * i) for i, flag in enumerate(flags)]
    figures = _steps_of(Job(4, 600, 3), steps, 4.0, 100)
    assert figures["prompt_tokens_per_second"] == pytest.approx(4 * 600 / 8.0)
    assert (figures["context"], figures["step_ms"], figures["late_step_ms"]) == (103.5, 500.0, 500.0)
    with pytest.raises(NotDecodesError, match="all 4 sequences"):
        _steps_of(Job(4, 600, 3), steps[:3], 4.0, 100)


def test_memory_for_some_sequences_alone_when_a_job_runs_then_it_has_no_figures_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_jobs, "_TOY_OPTIONS", {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1})
    make_checkpoint.make_checkpoint(TINY, tmp_path)
    ((name, figures),) = gpu_jobs.run_job(str(tmp_path), {"two": Job(2, 6, 3)}, Clock(CPU))
    assert name == "two"
    assert figures["tokens_per_second"] > 0
    assert "step_ms" not in figures


@pytest.mark.parametrize("name", ["", *SCHEMES])
@pytest.mark.parametrize(("outputs", "columns"), [(70, 1100), (16, 1024)])
def test_weights_when_counted_then_as_many_bytes_as_our_layers_hold(name: str, outputs: int, columns: int) -> None:
    scheme = SCHEMES[name] if name else None
    weight = torch.randn(outputs, columns).bfloat16()
    held = pack_whole(weight) if scheme is None else pack_rounded(weight, scheme)
    tensors = [part for part in (held.weight, held.scales, held.offsets) if part is not None]
    assert gpu_roofline.matrix_bytes(outputs, columns, scheme) == sum(part.nbytes for part in tensors)


def test_a_step_when_its_least_time_is_told_then_of_weights_and_of_each_sequences_keys_and_values() -> None:
    assert gpu_roofline.weight_bytes(TINY, None) == TINY.weight_bytes()
    head, norms = 1024 * 64, 2 * (2 * (64 + 64 + 16 + 16) + 64)
    layers = TINY.weight_bytes() - norms - 2 * head
    # A byte a weight and two for 128 columns of a group; here rows are one group but for those of 64 columns.
    in_int8 = gpu_roofline.weight_bytes(TINY, INT8) - norms
    assert layers // 2 + head < in_int8 < 1.05 * (layers // 2 + head)
    kept = 3 * 50 * 2 * 2 * 2 * 16 * 2  # sequences, tokens, layers, keys and values, heads, numbers, bytes
    figures = {"context": 50.0, "step_ms": 4.0}
    found = gpu_roofline.beside(figures, 3, TINY, None, rate=1e6)
    assert found["roofline_ms"] == pytest.approx((TINY.weight_bytes() + kept) / 1e3)
    assert found == {"roofline_ms": found["roofline_ms"], "of_roofline": pytest.approx(found["roofline_ms"] / 4)}
    assert gpu_roofline.beside({"seconds": 1.0}, 3, TINY, None, rate=1e6) == {}


def test_shares_when_the_device_was_not_measured_then_they_are_left_out(tmp_path: Path) -> None:
    run = replace(toy_run(), output=str(tmp_path / "result.json"))
    run.add("gemm", "layer", "novainfer", TB_s=2.0, of_copy=run.share(2e12, "copy"))
    run.peak["copy"] = 4e12
    run.add("gemm", "layer", "novainfer", TB_s=2.0, of_copy=run.share(2e12, "copy"))
    run.save()
    rows = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert [row.get("of_copy") for row in rows] == [None, 0.5]


def test_a_decode_with_its_list_when_called_again_then_the_list_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(WorkList, "of", lambda *given: made.append(given) or list_of(*given))
    for with_list, number in ((False, 1), (True, 3)):
        made.clear()
        (call,) = gpu_kernels.our_decodes([40, 40], CPU, is_toy=True, with_list=with_list)
        for _ in range(3):
            call()
        assert len(made) == number


def test_the_fields_job_when_drawn_then_it_has_as_many_tokens_as_others_report() -> None:
    prompts, params = gpu_jobs.requests(gpu_jobs.JOBS["256 of 100 to 1024"], 151_936)
    assert (len(prompts), sum(one.max_tokens for one in params)) == (256, 133_966)
