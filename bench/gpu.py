"""Our GPU path, checked and timed on one GPU: `python -m bench.gpu [--stages env,attention,...] [--output FILE]`.

Needs no network, and begins nothing new after `--minutes` (8.5); stages can be chosen. Every figure stands beside what
the same GPU does at most in the same run (copy and read bandwidth, bf16 products) and beside what others have. `--toy`
goes the same way at toy sizes through Triton's interpreter on a CPU: then the figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("env", "correct", "attention", "exact", "prefill", "sampler", "gemm", "job", "sanitizer")


_MINUTES = 8.5
_SANITIZER_SECONDS = 60.0


@dataclass
class Run:
    """What all stages share. rows: the table so far; peak: of this device, in bytes and operations per second."""

    device: Any
    clock: Any
    is_toy: bool
    shapes: tuple[str, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    peak: dict[str, float] = field(default_factory=dict)
    deadline: float = float("inf")  # of time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Until nothing new shall begin."""
        return max(self.deadline - time.monotonic(), 0.0)

    def attempt(self, stage: str) -> bool:
        """Run a stage unless the time is up. False if it failed: the table says so, and others may go on."""
        if self.seconds_left == 0:
            self.add(stage, "-", "left out: the time is up")
            return True
        try:
            _STAGES[stage](self)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.add(stage, "-", f"failed: {type(error).__name__}: {error}")
            return False
        return True

    def add(self, stage: str, what: str, who: str, **figures: float) -> None:
        """One line of the table, shown at once."""
        row = {"stage": stage, "what": what, "who": who, **figures}
        self.rows.append(row)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{time.strftime('%H:%M:%S')}  {stage:9}  {what:34}  {who:22}  {shown}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if what was checked is right."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help="by commas")
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3-8b", help="of the jobs, by commas")
    parser.add_argument("--toy", action="store_true", help="toy sizes, interpreted, on a CPU")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="after which nothing new begins")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args(argv)
    chosen = arguments.stages.split(",")
    unknown = sorted(set(chosen) - set(STAGES))
    if unknown:
        parser.error(f"unknown stages: {', '.join(unknown)}")
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch

    from bench import report
    from bench.gpu_clock import Clock

    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU; --toy goes without")
    device = torch.device("cpu" if arguments.toy else "cuda")
    shapes = ("tiny",) if arguments.toy else tuple(arguments.shapes.split(","))
    run = Run(device, Clock(device), arguments.toy, shapes, deadline=time.monotonic() + 60 * arguments.minutes)
    all_well = True
    for stage in chosen:
        all_well &= run.attempt(stage)
        # What was measured is kept, whatever becomes of the next stage.
        result = {"kind": "gpu", "toy": arguments.toy, "stages": chosen, "peak": run.peak, "rows": run.rows}
        report.write(result, arguments.output)
    return 0 if all_well else 1


def environment(run: Run) -> None:
    """What the device is, and what it does at most."""
    import torch

    size = 2**16 if run.is_toy else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    side = 64 if run.is_toy else 8192
    a, b = (torch.randn(side, side, device=run.device).bfloat16() for _ in range(2))
    words = source.view(torch.int64)
    found = run.clock.compare(
        {"copy": [lambda: target.copy_(source)], "read": [lambda: words.sum()], "matmul": [lambda: torch.mm(a, b)]}
    )
    run.peak["copy"] = 2 * size / found["copy"].median
    run.peak["read"] = size / found["read"].median
    run.peak["matmul"] = 2 * side**3 / found["matmul"].median
    name = "cpu" if run.is_toy else torch.cuda.get_device_name()
    import triton

    run.add("env", name, f"torch {torch.__version__}, triton {triton.__version__}", TB_s_copy=run.peak["copy"] / 1e12,
            TB_s_read=run.peak["read"] / 1e12, TFLOP_s=run.peak["matmul"] / 1e12)  # fmt: skip


def correct(run: Run) -> None:
    """The tests of the kernels, compiled (here: interpreted) for this device. Fails if one does."""
    import pytest

    files = ["triton_linear", "attention", "attention_input", "decode_inputs", "elementwise", "sampling",
             "triton_float8", "triton_gate_up", "triton_integers"]  # fmt: skip
    few = ["-k", "stride or four_bits or not_finite"] if run.is_toy else []
    began = time.perf_counter()
    status = pytest.main([*_pytest(*(files[:1] if run.is_toy else files)), *few])
    if status:
        raise SystemExit(f"the tests of the kernels failed ({status})")
    run.add("correct", "tests of the kernels", "passed", seconds=time.perf_counter() - began)


def sanitizer(run: Run) -> None:
    """Tests of attention under NVIDIA's memory checker, where it is installed."""
    program = shutil.which("compute-sanitizer")
    if run.is_toy or program is None:
        run.add("sanitizer", "attention", "left out: no compute-sanitizer")
        return
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest",
               *_pytest("attention"), "-k", "mixed_decode or several_launches or padding_rows"]  # fmt: skip
    _check(run, "sanitizer", "attention", command, _SANITIZER_SECONDS)


def _pytest(*names: str) -> list[str]:
    """Arguments for tests of kernels alone: what the other tests want to import need not be installed."""
    folder = Path(__file__).resolve().parents[1] / "tests" / "kernels"
    files = [str(folder / f"test_kernels_{name}.py") for name in names]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "default", "--confcutdir", str(folder)]
    # Most of their time goes into compiling, for which there are many cores.
    parallel = ["-n", "8"] if len(files) > 1 and importlib.util.find_spec("xdist") is not None else []
    # Not the project's own settings: they name plugins that may be missing.
    return ["-c", os.devnull, "--rootdir", str(folder.parents[1]), *options, *parallel, *files]


def _check(run: Run, stage: str, what: str, command: list[str], most_seconds: float = float("inf")) -> None:
    """Run a command that says by its status whether all is well. Fails if it is not."""
    began = time.perf_counter()
    try:
        done = subprocess.run(command, check=False, timeout=min(run.seconds_left, most_seconds))
    except subprocess.TimeoutExpired:
        run.add(stage, what, "left out: the time is up")
        return
    if done.returncode:
        raise SystemExit(f"{stage}: {what} failed ({done.returncode})")
    run.add(stage, what, "passed", seconds=time.perf_counter() - began)


def attention(run: Run) -> None:
    """Decode attention of 32 query and 8 key/value heads of 128 numbers, bf16, beside torch's over contiguous keys."""
    from bench.gpu_kernels import DECODES, TOY_DECODES, decode_calls

    for name, lengths in (TOY_DECODES if run.is_toy else DECODES).items():
        calls, num_bytes = decode_calls(lengths, run.device, is_toy=run.is_toy)
        for who, timing in run.clock.compare(calls).items():
            rate = num_bytes / timing.median
            share = rate / run.peak["copy"] if "copy" in run.peak else float("nan")
            run.add("attention", name, who, us=timing.median * 1e6, TB_s=rate / 1e12, of_copy=share)


def prefill(run: Run) -> None:
    """Prefill attention of the same heads: all of a prompt, and the end of one."""
    from bench.gpu_kernels import PREFILLS, TOY_PREFILLS, prefill_calls

    for name, (batch, queries, length) in (TOY_PREFILLS if run.is_toy else PREFILLS).items():
        calls, operations = prefill_calls(batch, queries, length, run.device, is_toy=run.is_toy)
        for who, timing in run.clock.compare(calls).items():
            rate = operations / timing.median
            share = rate / run.peak["matmul"] if "matmul" in run.peak else float("nan")
            run.add("prefill", name, who, us=timing.median * 1e6, TFLOP_s=rate / 1e12, of_matmul=share)


def sampler(run: Run) -> None:
    """Sampling from whole vocabularies, plain and with top-k and top-p."""
    from bench.gpu_kernels import SAMPLED_ROWS, TOY_SAMPLED_ROWS, TOY_VOCAB, VOCAB
    from bench.gpu_peers import sampler_calls

    for rows in TOY_SAMPLED_ROWS if run.is_toy else SAMPLED_ROWS:
        for filtered in (False, True):
            calls = sampler_calls(rows, TOY_VOCAB if run.is_toy else VOCAB, run.device, filtered=filtered)
            for who, timing in run.clock.compare(calls).items():
                name = f"{rows} rows, {'top-k and top-p' if filtered else 'temperature'}"
                run.add("sampler", name, who, us=timing.median * 1e6)


def gemm(run: Run) -> None:
    """Linear layers of an 8B model: ours (whole, int8, int4, fp8) beside the vendor's."""
    from bench.gpu_kernels import LAYERS, ROWS, TOY_LAYERS, TOY_ROWS, linear_calls

    for layer, (outputs, columns) in (TOY_LAYERS if run.is_toy else LAYERS).items():
        for rows in TOY_ROWS if run.is_toy else ROWS:
            calls = linear_calls(rows, outputs, columns, run.device, is_toy=run.is_toy)
            for who, timing in run.clock.compare(calls).items():
                done = 2 * rows * outputs * columns / timing.median
                read = 2 * outputs * columns / timing.median
                run.add(
                    "gemm",
                    f"{layer}, {rows} rows",
                    who,
                    us=timing.median * 1e6,
                    TFLOP_s=done / 1e12,
                    TB_s_bf16=read / 1e12,
                )


def job(run: Run) -> None:
    """Whole offline jobs with random weights: so many sequences at once, and the mean step of a decode at a context."""
    from bench.gpu_jobs import JOBS, TOY_JOBS, run_job, run_transformers
    from bench.make_checkpoint import SHAPES, make_checkpoint

    for shape in run.shapes:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(SHAPES[shape], Path(folder))
            for deterministic in (False, True):
                who = "deterministic" if deterministic else "normal"
                if run.seconds_left == 0:
                    run.add("job", shape, f"{who}: the time is up")
                    continue
                for name, figures in run_job(folder, TOY_JOBS if run.is_toy else JOBS, deterministic, run.is_toy):
                    run.add("job", f"{shape}: {name}", who, **figures)
                    if run.seconds_left == 0:
                        break
            name, figures = run_transformers(folder, run.device)
            run.add("job", f"{shape}: {name}", "transformers", **figures)


def exact(run: Run) -> None:
    """The exactness matrix in deterministic mode: tokens of one request in every batch, chunking and cache."""
    if run.is_toy:  # it takes minutes through the interpreter; the CPU's own run is in `make test`
        run.add("exact", "matrix", "left out")
        return
    command = [sys.executable, "-m", "tests.exactness.matrix", "--device", "cuda", "--pairs", "400"]
    _check(run, "exact", "matrix, 400 pairs", command)


_STAGES: dict[str, Callable[[Run], None]] = {
    "env": environment,
    "correct": correct,
    "sanitizer": sanitizer,
    "attention": attention,
    "prefill": prefill,
    "sampler": sampler,
    "gemm": gemm,
    "job": job,
    "exact": exact,
}

if __name__ == "__main__":
    sys.exit(main())
