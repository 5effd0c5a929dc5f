"""Our GPU path, checked and timed on one GPU: `python -m bench.gpu [--stages env,attention,...] [--output FILE]`.

Needs no network, and begins nothing new after `--minutes` (8.5); stages can be chosen. Every figure stands beside what
the same GPU does at most in the same run (copy and read bandwidth, bf16 products) and beside what others have. `--toy`
goes the same way at toy sizes through Triton's interpreter on a CPU: then the figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu_run import Run  # imports triton, which reads how it shall run

# By what is worth most, should the time not do for all.
STAGES = ("env", "attention", "job", "correct", "exact", "prefill", "rows", "sampler", "gemm", "quantized",
          "transformers", "sanitizer", "parity")  # fmt: skip

_MINUTES = 8.5
_JOBS_SECONDS = 45.0  # about what one engine takes to start, record its graphs and run a job: none begins that late
_CORRECT_SECONDS = 180.0
_SANITIZER_SECONDS = 60.0
_PARITY_SECONDS = 120.0
_TRANSFORMERS_SECONDS = 120.0  # the job runs twice: once so that all it needs is there
_EXACT_SECONDS = 100.0
_MATRIX_SHARE = 0.8  # of them, after which the matrix begins with no other circumstance
# Pairs and cases of the exactness matrix, by its model: each case, and each circumstance, loads the model anew.
_MATRIX = {"demo": (240, 24), "wide": (60, 10)}
_CHECKS = {"correct", "exact", "sanitizer", "parity"}  # one of them asked for, and nothing checked: that is no success
_QUANTIZED = ("fp8", "int4", "int8")


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 if what was checked is right."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help="by commas")
    parser.add_argument("--shapes", default="qwen3-8b,qwen3-0.6b", help="of the jobs, by commas")
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

    from bench.gpu_clock import Clock
    from bench.gpu_run import Run

    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU; --toy goes without")
    device = torch.device("cpu" if arguments.toy else "cuda")
    shapes = ("tiny",) if arguments.toy else tuple(arguments.shapes.split(","))
    deadline = time.monotonic() + 60 * arguments.minutes
    run = Run(device, Clock(device), arguments.toy, shapes, chosen, arguments.output, deadline=deadline)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its files do not stay
    try:
        return _run_stages(run, chosen)
    finally:
        run.close()
        signal.signal(signal.SIGTERM, before)


def _run_stages(run: Run, chosen: list[str]) -> int:
    all_well = True
    for stage in chosen:
        all_well &= attempt(run, stage)
        run.save()
    if not run.num_checked and _CHECKS.intersection(chosen):
        print("nothing was checked")
        return 1
    return 0 if all_well else 1


def attempt(run: Run, stage: str) -> bool:
    """Run a stage unless the time is up. False if it failed: the table says so, and others may go on."""
    if run.seconds_left == 0:
        run.add(stage, "-", "left out: the time is up")
        return True
    try:
        _STAGES[stage](run)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            raise
        traceback.print_exc()
        run.add(stage, "-", f"failed: {type(error).__name__}: {error}")
        return False
    return True


def correct(run: Run) -> None:
    """The tests of the kernels, compiled (here: interpreted) for this device. Fails if one does."""
    command = kernel_tests(is_toy=run.is_toy)
    run.check("correct", "tests of the kernels", command, "tests", float("inf") if run.is_toy else _CORRECT_SECONDS)


def kernel_tests(*, is_toy: bool) -> list[str]:
    """The command that runs them, without those of the CPU's kernels, which want a C++ compiler."""
    files = ["triton_linear", "attention", "attention_input", "decode_inputs", "elementwise", "sampling",
             "triton_float8", "triton_gate_up", "triton_integers", "sampling_candidates"]  # fmt: skip
    chosen = "not cpu and (stride or four_bits or not_finite)" if is_toy else "not cpu"
    return [*_pytest(*(files[:1] if is_toy else files), is_long=not is_toy), "-k", chosen]


def sanitizer(run: Run) -> None:
    """Tests of attention under NVIDIA's memory checker, where it is installed."""
    program = shutil.which("compute-sanitizer")
    if run.is_toy or program is None:
        run.add("sanitizer", "attention", "left out: no compute-sanitizer")
        return
    command = [program, "--tool", "memcheck", "--error-exitcode", "9",
               *_pytest("attention"), "-k", "mixed_decode or several_launches or padding_rows"]  # fmt: skip
    run.check("sanitizer", "attention", command, "tests", _SANITIZER_SECONDS)


def parity(run: Run) -> None:
    """Every family of models on this device against transformers on the CPU: greedy tokens, and log-probabilities."""
    chosen = "test_family_given and decoded and llama3" if run.is_toy else "test_family_given"
    command = [*_pytest("models", folder="parity", is_long=not run.is_toy), "-k", chosen]
    run.check("parity", "families", command, "tests", float("inf") if run.is_toy else _PARITY_SECONDS)


def _pytest(*names: str, folder: str = "kernels", is_long: bool = False) -> list[str]:
    """The command for tests of one folder alone: what the other tests want to import need not be installed."""
    root = Path(__file__).resolve().parents[1]
    files = [str(root / "tests" / folder / f"test_{folder}_{name}.py") for name in names]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "default", "--confcutdir", str(root / "tests" / folder)]
    # Most of their time goes into compiling, for which there are many cores.
    parallel = ["-n", "8"] if is_long and importlib.util.find_spec("xdist") is not None else []
    # Not the project's own settings: they name plugins that may be missing.
    settings = ["-c", os.devnull, "--rootdir", str(root)]
    return [sys.executable, "-m", "pytest", *settings, *options, *parallel, *files]


def exact(run: Run) -> None:
    """The exactness matrix in deterministic mode: tokens of one request in every batch, chunking and cache.

    Over the demo model, and over two layers as wide as an 8B model's, whose sums are split.
    """
    if run.is_toy:  # it takes minutes through the interpreter; a short form of both is in `make test`
        run.add("exact", "matrix", "left out")
        return
    for model, (pairs, cases) in _MATRIX.items():
        command = [sys.executable, "-m", "tests.exactness.matrix", "--device", "cuda"]
        seconds = _MATRIX_SHARE * min(run.seconds_left, _EXACT_SECONDS)
        command += ["--pairs", str(pairs), "--cases", str(cases), "--seconds", f"{seconds:.0f}"]
        if model != "demo":
            command += ["--long", "--model", run.checkpoint(model)]
        run.check("exact", f"{model}, of {pairs} pairs", command, "pairs", _EXACT_SECONDS)


def job(run: Run) -> None:
    """Whole offline jobs with random weights: so many sequences at once, and the mean step of a decode at a context."""
    from bench.gpu_jobs import JOBS, TOY_JOBS

    for shape in run.shapes:
        for deterministic in (False, True):
            who = "deterministic" if deterministic else "normal"
            _jobs(run, "job", shape, who, TOY_JOBS if run.is_toy else JOBS, deterministic=deterministic)


def quantized(run: Run) -> None:
    """Short jobs of the largest model with weights that are rounded as they are loaded."""
    from bench.gpu_jobs import SHORT_JOBS, TOY_JOBS
    from bench.make_checkpoint import SHAPES

    shape = max(run.shapes, key=lambda name: SHAPES[name].weight_bytes())
    for scheme in _QUANTIZED[:1] if run.is_toy else _QUANTIZED:
        jobs = TOY_JOBS if run.is_toy else SHORT_JOBS
        _jobs(run, "quantized", shape, scheme, jobs, most_rows=64, quantization=scheme)


def _jobs(run: Run, stage: str, shape: str, who: str, jobs: dict[str, Any], **options: Any) -> None:
    from bench.gpu_jobs import run_job
    from bench.gpu_roofline import beside
    from bench.make_checkpoint import SHAPES
    from kernels.linear.schemes import SCHEMES

    if run.seconds_left < (0 if run.is_toy else _JOBS_SECONDS):
        run.add(stage, shape, f"{who}: the time is up")
        return
    scheme = SCHEMES.get(options.get("quantization", ""))
    for name, figures in run_job(run.checkpoint(shape), jobs, run.clock, **options):
        if "read" in run.peak:
            figures |= beside(figures, jobs[name].sequences, SHAPES[shape], scheme, run.peak["read"])
        run.add(stage, f"{shape}: {name}", who, **figures)
        run.save()
        if run.seconds_left < (0 if run.is_toy else _JOBS_SECONDS):
            return


def transformers(run: Run) -> None:
    """A small job by transformers' continuous batching, in a process of its own, which may take long or die."""
    import torch

    from bench.gpu_jobs import JOBS, TOY_JOBS

    jobs, name = (TOY_JOBS, next(iter(TOY_JOBS))) if run.is_toy else (JOBS, "64 x (1024 -> 128)")
    job = jobs[name]
    gc.collect()
    if not run.is_toy:
        torch.cuda.empty_cache()  # its cache goes by what is free
    for shape in run.shapes:
        command = [sys.executable, "-m", "bench.gpu_peers", run.checkpoint(shape), "--device", str(run.device)]
        sizes = {"sequences": job.sequences, "num-input": job.num_input, "num-output": job.num_output}
        for option, value in {**sizes, "vocab": 100 if run.is_toy else 10_000}.items():
            command += [f"--{option}", str(value)]
        figures = run.figures_of(command, float("inf") if run.is_toy else _TRANSFORMERS_SECONDS)
        if isinstance(figures, str):
            run.add("transformers", f"{shape}: {name}", figures)
        else:
            attention = figures.pop("attention")
            run.add("transformers", f"{shape}: {name}", f"transformers ({attention}, greedy)", **figures)


def _kernels(name: str) -> Callable[[Run], None]:
    """A stage that times kernels, imported when it is run: by then it is settled how triton runs."""

    def stage(run: Run) -> None:
        from bench import gpu_stages

        call: Callable[[Run], None] = getattr(gpu_stages, name)
        call(run)

    return stage


_STAGES: dict[str, Callable[[Run], None]] = {
    "env": _kernels("environment"),
    "correct": correct,
    "attention": _kernels("attention"),
    "exact": exact,
    "prefill": _kernels("prefill"),
    "rows": _kernels("rows"),
    "sampler": _kernels("sampler"),
    "gemm": _kernels("gemm"),
    "job": job,
    "quantized": quantized,
    "transformers": transformers,
    "sanitizer": sanitizer,
    "parity": parity,
}

if __name__ == "__main__":
    sys.exit(main())
