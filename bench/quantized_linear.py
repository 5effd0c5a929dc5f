"""How fast quantised linears are beside bf16 ones: `python -m bench.quantized_linear [--threads 2] [--rows 1 16 256]`.

A layer is run as a step runs it: among others, all in one native call. For few rows each of them has another copy of
the weights, so many that no cache holds one until it comes round again; the figure to look at is then the rate at which
packed weights are read, in terms of what the threads read at best just before, doing nothing else. Packed bf16 weights
may be smaller than they are (native/coded.h); `of_numbers` is the rate at which whole bf16 numbers go by. For many rows
it is the time in terms of the bf16 kernel's. Each figure is a layer's mean over the fastest of these calls: what else
runs on the machine makes calls slower, never faster.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from bench import report, roofline
from kernels.backend import AttentionMetadata
from kernels.cpu_backend import CpuBackend
from kernels.linear.cpu import NativeLinear
from kernels.linear.schemes import INTEGER_SCHEMES

SHAPES = ((1024, 3072), (3072, 1024), (1024, 151936))  # (K, N)
_COLD_BYTES = 400_000_000  # of all copies of a weight together
_SECONDS = 2.0  # for each figure


def packed_ways(k: int, n: int) -> dict[str, list[NativeLinear]]:
    """By name, copies of one weight in each form."""
    backend, weight = CpuBackend(), torch.randn(n, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    ways: dict[str, list[NativeLinear]] = {}
    for name, scheme in {"bfloat16": None, **INTEGER_SCHEMES}.items():
        first = backend.pack_linear(weight, None, scheme)
        if not isinstance(first, NativeLinear):
            raise SystemExit("there are no native kernels here")
        count = 1 + _COLD_BYTES // first.weight_nbytes
        copies = [backend.pack_linear(weight, None, scheme) for _ in range(count - 1)]
        ways[name] = [first, *(copy for copy in copies if isinstance(copy, NativeLinear))]
    return ways


def seconds_of(layers: list[NativeLinear], count: int) -> float:
    """Of one layer, on `count` rows, among all of them."""
    k, n = layers[0].in_features, layers[0].out_features
    program = CpuBackend().program(count, torch.bfloat16)
    if program is None:
        raise SystemExit("there are no native kernels here")
    x = program.buffer("x", k).copy_(torch.randn(count, k))
    for layer in layers:
        program.linear(layer, x, program.buffer("y", n))
    each = torch.arange(count, dtype=torch.int32)  # tokens: nothing that is recorded looks at where they stand
    metadata = AttentionMetadata(torch.arange(count + 1, dtype=torch.int32), each, each[:, None], count, 1, count)
    places = each.long()
    return roofline.fastest([lambda: program.run(places, places, metadata)], _SECONDS) / len(layers)


def measure(rows: list[int]) -> list[dict[str, Any]]:
    """One entry for each shape and number of rows."""
    results = []
    for k, n in SHAPES:
        ways = packed_ways(k, n)
        for count in rows:
            rate = roofline.measure().bytes_per_second
            entry: dict[str, Any] = {"k": k, "n": n, "rows": count, "read_gb_per_second": round(rate / 1e9, 1)}
            for name, copies in ways.items():
                seconds = seconds_of(copies[:2] if count > 64 else copies, count)
                entry[f"{name}_us"] = round(seconds * 1e6, 1)
                entry[f"{name}_read_share"] = round(copies[0].weight_nbytes / seconds / rate, 3)
                entry[f"{name}_gflops"] = round(2e-9 * count * k * n / seconds)
                entry[f"{name}_of_bfloat16"] = round(entry["bfloat16_us"] / entry[f"{name}_us"], 3)
            entry["of_numbers"] = round(entry["bfloat16_read_share"] * 2 * k * n / ways["bfloat16"][0].weight_nbytes, 3)
            print(entry, flush=True)
            results.append(entry)
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantized_linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    result = {"kind": "quantized_linear", "threads": arguments.threads, "load_before": load}
    result["results"] = measure(arguments.rows)
    report.write(result, arguments.output)


if __name__ == "__main__":
    main()
