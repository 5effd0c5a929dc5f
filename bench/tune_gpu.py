"""Makes the table of a GPU for `kernels/triton_tuning.py`: `python -m bench.tune_gpu [--output FILE]`.

Every candidate of every kernel is timed as `bench.gpu` times kernels: in CUDA graphs, with a cold cache, in turns, the
median of three rounds. The table has a choice where it beats the default by more than the noise. `--toy` goes the same
way with a few of them on a CPU, where all candidates are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], object]

_LEAST_GAIN = 1.02
_TOY_STRIDE = 6


@dataclass(frozen=True, slots=True)
class Question:
    """One line of the table: what runs it, and what may be chosen; the default first."""

    key: str
    calls: Callable[[], list[Call]]
    candidates: tuple[tuple[int, int], ...]  # warps, stages


def questions(device: Any, *, is_toy: bool) -> list[Question]:
    """Of the kernels whose launches the table knows, at the shapes of 8B models and of small ones."""
    found = []
    for head_dim in (32,) if is_toy else (128, 64, 256):
        found += [_decode(head_dim, is_float8, device, is_toy) for is_float8 in (False, True)]
        found += [_prefill(head_dim, is_exact, device, is_toy) for is_exact in (False, True)]
    for name in ("", " int8", " int4", " fp8"):
        found += [_linear(name, rows, device, is_toy) for rows in (64, 128)]
        found.append(_gate_up(name, 64, device, is_toy))
    # With many rows integers have no such launch.
    return found + [_gate_up(name, 128, device, is_toy) for name in ("", " fp8")]


def _decode(head_dim: int, is_float8: bool, device: Any, is_toy: bool) -> Question:
    from bench.gpu_kernels import FLOAT8_KV, decode_calls
    from kernels.triton_tuning import table_key

    lengths = [40, 300] if is_toy else [4096] * 64
    default = 5 if head_dim <= 128 else 3
    return Question(
        table_key("decode", {"head_dim": head_dim, "itemsize": 2, "float8": int(is_float8)}),
        lambda: decode_calls(lengths, device, is_toy=is_toy, dim=head_dim)[0][FLOAT8_KV if is_float8 else "novainfer"],
        _default_first((4, default), [(4, 3), (4, 2), (4, 5), (4, 6), (4, 7), (2, 5), (8, 5)]),
    )


def _prefill(head_dim: int, is_exact: bool, device: Any, is_toy: bool) -> Question:
    from bench.gpu_kernels import prefill_calls
    from kernels.triton_tuning import table_key

    prompt = (1, 20, 20) if is_toy else (1, 4096, 4096)
    who, rows = ("novainfer deterministic", 32) if is_exact else ("novainfer", 64)
    return Question(
        table_key("prefill", {"head_dim": head_dim, "itemsize": 2, "float8": 0, "rows": rows}),
        lambda: prefill_calls(*prompt, device, is_toy=is_toy, dim=head_dim)[0][who],
        _default_first((4 if head_dim <= 128 else 8, 2), [(4, 2), (4, 3), (4, 5), (8, 2), (8, 3), (8, 5)]),
    )


def _linear(name: str, rows: int, device: Any, is_toy: bool) -> Question:
    from bench.gpu_kernels import LAYERS, TOY_LAYERS, linear_calls
    from kernels.triton_tuning import table_key

    outputs, columns = TOY_LAYERS["layer"] if is_toy else LAYERS["gate_up"]
    return Question(
        table_key("linear", _linear_features(name, rows, is_gated=False)),
        lambda: linear_calls(rows, outputs, columns, device, is_toy=is_toy)[f"novainfer{name}"],
        tuple((rows // 16, stages) for stages in (4, 3, 5)),
    )


def _gate_up(name: str, rows: int, device: Any, is_toy: bool) -> Question:
    """With few rows the activation is taken in this launch only where K is one chunk: a small model's."""
    from bench.gpu_kernels import LAYERS, gate_up_calls
    from kernels.triton_tuning import table_key

    outputs, columns = (6144, 1024) if rows <= 64 else LAYERS["gate_up"]
    if is_toy:
        outputs, columns = 70, 130
    return Question(
        table_key("linear", _linear_features(name, rows, is_gated=True)),
        lambda: gate_up_calls(rows, outputs, columns, device, is_toy=is_toy)[f"novainfer{name}"],
        tuple((rows // 16, stages) for stages in (4, 3, 2)),
    )


def _linear_features(name: str, rows: int, *, is_gated: bool) -> dict[str, int]:
    bits = {"": 16, " int8": 8, " int4": 4, " fp8": 8}[name]
    return {"bits": bits, "float8": int(name == " fp8"), "itemsize": 2, "rows": rows, "gated": int(is_gated)}


def _default_first(default: tuple[int, int], others: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return (default, *(other for other in others if other != default))


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_gpu", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="toy sizes, interpreted, on a CPU")
    parser.add_argument("--output", help="default: where the kernels look for it")
    arguments = parser.parse_args(argv)
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch

    from bench.gpu_clock import Clock
    from kernels.triton_tuning import table_path

    if not arguments.toy and not torch.cuda.is_available():
        parser.error("there is no GPU; --toy goes without")
    if arguments.toy and not arguments.output:
        parser.error("--toy makes no table for the kernels: say where it goes with --output")
    device = torch.device("cpu" if arguments.toy else "cuda")
    name = "cpu" if arguments.toy else torch.cuda.get_device_name()
    clock = Clock(device)
    choices = {}
    asked = questions(device, is_toy=arguments.toy)
    for question in asked[::_TOY_STRIDE] if arguments.toy else asked:
        best = _best(question, clock)
        if best is not None:
            choices[question.key] = best
    path = Path(arguments.output) if arguments.output else table_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"device": name, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "choices": choices}
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    print(f"{len(choices)} choices that are not the default: {path}")
    return 0


def _best(question: Question, clock: Any) -> tuple[int, int] | None:
    """The candidate to put into the table; None if the default is as good."""
    from kernels.triton_tuning import forced

    calls = {}
    for candidate in question.candidates:

        def run(call: Call, candidate: tuple[int, int] = candidate) -> object:
            with forced({question.key: candidate}):
                return call()

        try:
            made = [lambda call=call, run=run: run(call) for call in question.calls()]
            made[0]()
        except Exception as error:  # more shared memory or registers than there are
            print(f"{question.key}: {candidate} does not run: {type(error).__name__}: {error}")
            continue
        calls[str(candidate)] = made
    timings = clock.compare(calls)
    if not timings:
        print(f"{question.key}: no candidate runs, the default stays")
        return None
    names = {str(candidate): candidate for candidate in question.candidates}
    best = min(timings, key=lambda name: timings[name].median)
    default = str(question.candidates[0])
    gain = timings[default].median / timings[best].median if default in timings else float("inf")
    shown = "  ".join(f"{name} {timing.median * 1e6:.1f} us" for name, timing in timings.items())
    print(f"{question.key}: {shown}", flush=True)
    return names[best] if gain > _LEAST_GAIN and best != default else None


if __name__ == "__main__":
    sys.exit(main())
