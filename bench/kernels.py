"""The native CPU kernels by themselves: `python -m bench.kernels [--against LIBRARY.so]`.

`--against` takes another build of them (`python -m kernels.native.build` says where they lie, here or in another
checkout), with the same structs; its name says for which instruction set. Both run in this process, call by call in
turns: where the machine's speed changes from one moment to the next nothing else shows a difference of a few percent.
Rates are of the median call, beside what the threads read and multiply doing nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import report, roofline
from kernels.backend import AttentionMetadata, AttentionParams
from kernels.cpu_backend import CpuBackend
from kernels.native.library import NativeLibrary

ROWS = (1, 4, 8, 16, 32, 256)
_DEPTH, _COLUMNS, _COLD_BYTES = 1024, 3072, 256_000_000
_HEADS, _KV_HEADS, _DIM, _BLOCK = 16, 8, 128, 16
_CONTEXTS = ((256, 1024), (1, 1024), (1, 8192))  # queries at the end of so many tokens
_BATCH, _SHORT = 16, 160  # sequences, and tokens of each
_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """Calls that are timed together, and what they do: `amount` in `unit` without its seconds."""

    name: str
    calls: list[Callable[[], object]]
    amount: float
    unit: str

    def rate(self) -> float:
        """Of one pass."""
        began = time.perf_counter()
        for call in self.calls:
            call()
        return self.amount / (time.perf_counter() - began)


def cases(backend: CpuBackend) -> list[Case]:
    """In bf16; a row's linear layers find no weight in a cache."""
    return [*linear_cases(backend), *attention_cases(backend), decode_case(backend), *row_cases(backend)]


def linear_cases(backend: CpuBackend) -> list[Case]:
    """Of so many rows: GB/s of weights while these are what takes the time, else GFLOP/s."""
    weight = torch.randn(_COLUMNS, _DEPTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    copies = [backend.pack_linear(weight) for _ in range(_COLD_BYTES // weight.nbytes)]
    found = []
    for rows in ROWS:
        x = torch.randn(rows, _DEPTH).bfloat16()
        used = copies if rows <= 32 else copies[:4]
        calls: list[Callable[[], object]] = [partial(copy, x) for copy in used]
        per_call, unit = (weight.nbytes, "GB/s") if rows <= 16 else (2 * rows * weight.numel(), "GFLOP/s")
        found.append(Case(f"linear, {rows} rows", calls, 1e-9 * per_call * len(used), unit))
    return found


def attention_cases(backend: CpuBackend) -> list[Case]:
    """Queries at the end of a context: GFLOP/s of those products that causality leaves."""
    found = []
    for queries, context in _CONTEXTS:
        blocks = context // _BLOCK
        caches = backend.allocate_kv_cache(blocks, _BLOCK, _KV_HEADS, _DIM, torch.bfloat16, torch.device("cpu"))
        key, value = (torch.randn(context, _KV_HEADS, _DIM).bfloat16() for _ in range(2))
        backend.store_kv(key, value, *caches, torch.arange(context))
        query = torch.randn(queries, _HEADS, _DIM).bfloat16()
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, queries], dtype=torch.int32),
            seq_lens=torch.tensor([context], dtype=torch.int32),
            block_table=torch.arange(blocks, dtype=torch.int32).view(1, -1),
            num_decodes=int(queries == 1),
            max_query_len=queries,
            max_seq_len=context,
        )
        call = partial(backend.paged_attention, query, *caches, metadata, AttentionParams(_DIM**-0.5), query.clone())
        products = sum(context - queries + i + 1 for i in range(queries)) * _HEADS * _DIM * 2
        found.append(Case(f"attention, {queries} of {context}", [call], 2e-9 * products, "GFLOP/s"))
    return found


def decode_case(backend: CpuBackend) -> Case:
    """One query each at the end of short sequences whose keys and values no cache holds: GB/s of these."""
    blocks = _SHORT // _BLOCK
    key, value = (torch.randn(_BATCH * _SHORT, _KV_HEADS, _DIM).bfloat16() for _ in range(2))
    query = torch.randn(_BATCH, _HEADS, _DIM).bfloat16()
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(_BATCH + 1, dtype=torch.int32),
        seq_lens=torch.full((_BATCH,), _SHORT, dtype=torch.int32),
        block_table=torch.randperm(_BATCH * blocks, dtype=torch.int32).view(_BATCH, -1),
        num_decodes=_BATCH,
        max_query_len=1,
        max_seq_len=_SHORT,
    )
    calls: list[Callable[[], object]] = []
    for _ in range(_COLD_BYTES // (2 * key.nbytes)):
        caches = backend.allocate_kv_cache(
            _BATCH * blocks, _BLOCK, _KV_HEADS, _DIM, torch.bfloat16, torch.device("cpu")
        )
        backend.store_kv(key, value, *caches, torch.arange(_BATCH * _SHORT))
        calls.append(
            partial(backend.paged_attention, query, *caches, metadata, AttentionParams(_DIM**-0.5), query.clone())
        )
    return Case(f"attention, {_BATCH} of {_SHORT} each", calls, 1e-9 * 2 * key.nbytes * len(calls), "GB/s")


def row_cases(backend: CpuBackend) -> list[Case]:
    """What works on each token by itself: millions of numbers a second."""
    hidden, gate_up = torch.randn(_TOKENS, _DEPTH).bfloat16(), torch.randn(_TOKENS, 2 * _COLUMNS).bfloat16()
    key = torch.randn(_TOKENS, _KV_HEADS, _DIM).bfloat16()
    caches = backend.allocate_kv_cache(_TOKENS // _BLOCK, _BLOCK, _KV_HEADS, _DIM, torch.bfloat16, torch.device("cpu"))
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "norm": (partial(backend.rms_norm, hidden, torch.ones(_DEPTH).bfloat16(), 1e-6), hidden.numel()),
        "activation": (partial(backend.act_mul, gate_up, "silu"), gate_up.numel() // 2),
        "store keys and values": (partial(backend.store_kv, key, key, *caches, torch.arange(_TOKENS)), 2 * key.numel()),
    }
    return [Case(f"{name}, {_TOKENS} tokens", [call], 1e-6 * count, "M/s") for name, (call, count) in calls.items()]


def compare(ours: list[Case], others: list[Case] | None, rounds: int) -> list[dict[str, Any]]:
    """One entry for each case: median rates, of both in turns, and ours to the other's."""
    results = []
    for number, case in enumerate(ours):
        sides = {"ours": case} if others is None else {"ours": case, "other": others[number]}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side.rate()  # not counted: memory is given, threads wake
        for turn in range(rounds):
            for name in sorted(sides, reverse=turn % 2 == 0):
                rates[name].append(sides[name].rate())
        entry: dict[str, Any] = {"case": case.name, "unit": case.unit}
        entry |= {name: round(statistics.median(values), 1) for name, values in rates.items()}
        if others is not None:
            entry["ratio"] = round(entry["ours"] / entry["other"], 3)
        print(entry, flush=True)
        results.append(entry)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="LIBRARY.so")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    backend = CpuBackend()
    if backend.isa is None:
        raise SystemExit("there are no native kernels here")
    other = None
    if arguments.against is not None:
        isa = arguments.against.stem.removeprefix("libnova-")
        other = CpuBackend(library=NativeLibrary(isa, arguments.against))
    machine = roofline.measure()
    print(
        f"threads read {machine.bytes_per_second / 1e9:.1f} GB/s, multiply {machine.flops_per_second / 1e9:.0f} GFLOP/s"
    )
    results = compare(cases(backend), None if other is None else cases(other), arguments.rounds)
    report.write({"kind": "kernels", "threads": arguments.threads, "results": results}, arguments.output)


if __name__ == "__main__":
    main()
