"""Makes the table of a GPU for `kernels/triton_tuning.py`: `python -m bench.tune_gpu [--only decode] [--output FILE]`.

Every candidate of every kernel is timed as `bench.gpu` times kernels: in CUDA graphs, with a cold cache, in turns, the
median of three rounds. The table has a choice where it beats the default by more than the noise. It is written after
each question; what a table that is there says of questions that are not asked, or that `--minutes` left no time for,
stays. `--toy` goes the same way with a few of them on a CPU, where all candidates are the same.
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
_MINUTES = 8.5
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
    import torch

    from bench.gpu_kernels import our_decodes
    from kernels.triton_tuning import table_key

    lengths = [40, 300] if is_toy else [4096] * 64
    stored = torch.float8_e4m3fn if is_float8 else None
    return Question(
        table_key("decode", {"head_dim": head_dim, "itemsize": 2, "float8": int(is_float8)}),
        lambda: our_decodes(lengths, device, is_toy=is_toy, dim=head_dim, stored=stored),
        _default_first((4, 2), [(4, 1), (4, 3), (4, 5), (2, 2), (2, 3), (8, 2)]),
    )


def _prefill(head_dim: int, is_exact: bool, device: Any, is_toy: bool) -> Question:
    from bench.gpu_kernels import our_prefill
    from kernels.triton_tuning import table_key

    prompt = (1, 20, 20) if is_toy else (1, 4096, 4096)
    rows = 32 if is_exact else 128 if head_dim <= 128 else 64
    return Question(
        table_key("prefill", {"head_dim": head_dim, "itemsize": 2, "float8": 0, "rows": rows}),
        lambda: [our_prefill(*prompt, device, exact=is_exact, is_toy=is_toy, dim=head_dim)],
        _default_first((4 if is_exact and head_dim <= 128 else 8, 2), [(4, 2), (4, 3), (8, 2), (8, 3), (8, 5)]),
    )


def _linear(name: str, rows: int, device: Any, is_toy: bool) -> Question:
    from bench.gpu_kernels import LAYERS, SCHEMES, TOY_LAYERS, our_linears
    from kernels.triton_tuning import table_key

    outputs, columns = TOY_LAYERS["layer"] if is_toy else LAYERS["gate_up"]
    return Question(
        table_key("linear", _linear_features(name, rows, is_gated=False)),
        lambda: our_linears(rows, outputs, columns, device, SCHEMES[name], is_toy=is_toy),
        tuple((rows // 16, stages) for stages in (4, 3, 5)),
    )


def _gate_up(name: str, rows: int, device: Any, is_toy: bool) -> Question:
    """With few rows the activation is taken in this launch only where K is one chunk: a small model's."""
    from bench.gpu_kernels import LAYERS, SCHEMES, our_gate_ups
    from kernels.triton_tuning import table_key

    outputs, columns = (6144, 1024) if rows <= 64 else LAYERS["gate_up"]
    if is_toy:
        outputs, columns = 70, 130
    return Question(
        table_key("linear", _linear_features(name, rows, is_gated=True)),
        lambda: our_gate_ups(rows, outputs, columns, device, SCHEMES[name], is_toy=is_toy),
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
    parser.add_argument("--only", default="", help="questions whose names begin so, by commas: decode,linear bits=4")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="after which no question is begun")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * arguments.minutes
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
    path = Path(arguments.output) if arguments.output else table_path(name)
    known = questions(device, is_toy=arguments.toy)
    asked = [question for question in known if question.key.startswith(tuple(arguments.only.split(",")))]
    if not asked:
        parser.error(f"no question is named so; there are: {', '.join(question.key for question in known)}")
    table = Table(path, name, [question.key for question in known])
    return ask(asked[::_TOY_STRIDE] if arguments.toy else asked, table, Clock(device), deadline)


class Table:
    """The file of a GPU, with what it said before of questions that there still are."""

    def __init__(self, path: Path, device: str, keys: list[str]) -> None:
        """keys: of all questions."""
        from kernels.triton_tuning import read_table

        self._path, self._device = path, device
        self.choices = {key: choice for key, choice in read_table(path).items() if key in keys}

    def answer(self, key: str, best: tuple[int, int] | None) -> None:
        """Write it with this choice; None: the default."""
        import torch

        self.choices.pop(key, None)
        if best is not None:
            self.choices[key] = best
        table = {"device": self._device, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**table, "choices": self.choices}, indent=2) + "\n"
        whole = self._path.with_suffix(".new")  # so that whoever is stopped while it writes leaves the one before
        whole.write_text(text, encoding="utf-8")
        whole.replace(self._path)


def ask(asked: list[Question], table: Table, clock: Any, deadline: float) -> int:
    """Answer one question after another while there is time, until time.monotonic() is `deadline`. 1 if none was."""
    answered = 0
    for number, question in enumerate(asked):
        if time.monotonic() >= deadline:
            print(f"the time is up; left out: {', '.join(other.key for other in asked[number:])}")
            break
        try:
            best = _best(question, clock)
        except Exception as error:  # too little memory for its weights, say: the others can do without it
            print(f"{question.key}: failed: {type(error).__name__}: {error}")
            continue
        table.answer(question.key, best)
        answered += 1
    print(f"{answered} questions, {len(table.choices)} choices that are not the default")
    return 0 if answered else 1


def _best(question: Question, clock: Any) -> tuple[int, int] | None:
    """The candidate to put into the table; None if the default is as good."""
    from kernels.triton_tuning import forced

    calls = {}
    own = question.calls()  # for all candidates: together they read more than any cache holds
    for candidate in question.candidates:

        def run(call: Call, candidate: tuple[int, int] = candidate) -> object:
            with forced({question.key: candidate}):
                return call()

        try:
            made = [lambda call=call, run=run: run(call) for call in own]
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
