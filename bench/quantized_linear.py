"""How fast quantised linears are beside bf16 ones: `python -m bench.quantized_linear [--threads 2] [--rows 1 16 256]`.

For few rows every call takes another copy of the weights, so many of them that no cache holds one until it comes round
again; the figure to look at is then the rate at which packed weights are read, in terms of what the threads read at
best, doing nothing else. For many rows it is the time in terms of the bf16 kernel's. Each figure is of the fastest
call: what else runs on the machine makes calls slower, never faster.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch

from bench import report, roofline
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


def measure(rows: list[int]) -> list[dict[str, Any]]:
    """One entry for each shape and number of rows."""
    rate, results = roofline.measure().bytes_per_second, []
    print(f"threads read {rate / 1e9:.1f} GB/s")
    for k, n in SHAPES:
        ways = packed_ways(k, n)
        for count in rows:
            x = torch.randn(count, k).bfloat16()
            entry: dict[str, Any] = {"k": k, "n": n, "rows": count}
            for name, copies in ways.items():
                calls = [partial(copy, x) for copy in copies]
                seconds = roofline.fastest(calls[:2] if count > 64 else calls, _SECONDS)
                entry[f"{name}_us"] = round(seconds * 1e6, 1)
                entry[f"{name}_read_share"] = round(copies[0].weight_nbytes / seconds / rate, 3)
                entry[f"{name}_gflops"] = round(2e-9 * count * k * n / seconds)
                entry[f"{name}_of_bfloat16"] = round(entry["bfloat16_us"] / entry[f"{name}_us"], 3)
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
