"""The stages of `bench.gpu` that time kernels. Each puts its lines into the run's table."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from bench.gpu_clock import Timing
from bench.gpu_kernels import (
    DECODES,
    FLOAT8_KV,
    LAYERS,
    LISTED,
    PREFILLS,
    ROWS,
    SAMPLED_ROWS,
    SCHEMES,
    TOKENS,
    TOY_DECODES,
    TOY_LAYERS,
    TOY_LISTED,
    TOY_PREFILLS,
    TOY_ROWS,
    TOY_SAMPLED_ROWS,
    TOY_TOKENS,
    TOY_VOCAB,
    VOCAB,
    decode_calls,
    input_calls,
    linear_calls,
    prefill_calls,
    row_calls,
)
from bench.gpu_peers import FILTERS, sampler_calls
from bench.gpu_roofline import matrix_bytes
from bench.gpu_run import Run

Call = Callable[[], object]


def environment(run: Run) -> None:
    """What the device is, and what it does at most."""
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
    who = f"torch {torch.__version__}, triton {triton.__version__}"
    terabytes = {f"TB_s_{kind}": run.peak[kind] / 1e12 for kind in ("copy", "read")}
    run.add("env", name, who, **terabytes, TFLOP_s=run.peak["matmul"] / 1e12)


def attention(run: Run) -> None:
    """Decode attention of 32 query and 8 key/value heads of 128 numbers, bf16, beside torch's over contiguous keys.

    A layer's: the list of work, which a step makes once for all layers, is there already but in the lines that say so.
    """
    listed = TOY_LISTED if run.is_toy else LISTED
    for name, lengths in (TOY_DECODES if run.is_toy else DECODES).items():
        calls, num_bytes = decode_calls(lengths, run.device, is_toy=run.is_toy, with_list=name in listed)
        for who, timing in run.clock.compare(calls).items():
            _moved(run, "attention", name, who, timing, num_bytes // 2 if who == FLOAT8_KV else num_bytes)


def prefill(run: Run) -> None:
    """Prefill attention of the same heads: all of a prompt, and the end of one."""
    for name, (batch, queries, length) in (TOY_PREFILLS if run.is_toy else PREFILLS).items():
        calls, operations = prefill_calls(batch, queries, length, run.device, is_toy=run.is_toy)
        for who, timing in run.clock.compare(calls).items():
            rate = operations / timing.median
            run.add_timing("prefill", name, who, timing, TFLOP_s=rate / 1e12, of_matmul=run.share(rate, "matmul"))


def rows(run: Run) -> None:
    """What stands between QKV and attention, in one launch and in parts; norms, and activations by themselves."""
    for tokens in TOY_TOKENS if run.is_toy else TOKENS:
        calls, num_bytes = input_calls(tokens, run.device, is_toy=run.is_toy)
        for who, timing in run.clock.compare(calls).items():
            _moved(run, "rows", f"QK-norm, rotary, store, {tokens} tokens", who, timing, num_bytes)
        for name, (calls, num_bytes) in row_calls(tokens, run.device, is_toy=run.is_toy).items():
            for who, timing in run.clock.compare(calls).items():
                _moved(run, "rows", f"{name}, {tokens} tokens", who, timing, num_bytes)


def sampler(run: Run) -> None:
    """Sampling from whole vocabularies, plain, with top-k and top-p, and with top-p alone; bytes: logits read once."""
    for num_rows in TOY_SAMPLED_ROWS if run.is_toy else SAMPLED_ROWS:
        for filters in FILTERS:
            vocab = TOY_VOCAB if run.is_toy else VOCAB
            calls = sampler_calls(num_rows, vocab, run.device, filters)
            for who, timing in run.clock.compare(calls).items():
                _moved(run, "sampler", f"{num_rows} rows, {filters}", who, timing, 4 * num_rows * vocab)


def gemm(run: Run) -> None:
    """Linear layers of an 8B model: ours (whole, int8, int4, fp8) beside the vendor's. Bytes are those of the weights
    as they are held; the peak of products is that of bf16, for all of them.
    """
    schemes = {f"novainfer{name}": scheme for name, scheme in SCHEMES.items()}
    for layer, (outputs, columns) in (TOY_LAYERS if run.is_toy else LAYERS).items():
        for num_rows in TOY_ROWS if run.is_toy else ROWS:
            calls = linear_calls(num_rows, outputs, columns, run.device, is_toy=run.is_toy)
            for who, timing in run.clock.compare(calls).items():
                done = 2 * num_rows * outputs * columns / timing.median
                shares = {"TFLOP_s": done / 1e12, "of_matmul": run.share(done, "matmul")}
                num_bytes = matrix_bytes(outputs, columns, schemes.get(who))
                _moved(run, "gemm", f"{layer}, {num_rows} rows", who, timing, num_bytes, **shares)


def _moved(run: Run, stage: str, what: str, who: str, timing: Timing, num_bytes: int, **figures: float) -> None:
    """A line about what has to read and write so many bytes."""
    rate = num_bytes / timing.median
    run.add_timing(stage, what, who, timing, TB_s=rate / 1e12, of_copy=run.share(rate, "copy"), **figures)
