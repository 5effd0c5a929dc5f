"""Results as JSON that says which code ran on which machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from novainfer import __version__

REPOSITORY = Path(__file__).resolve().parent.parent


def origin() -> dict[str, Any]:
    """Version, commit, time and machine of a measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "version": __version__,
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(_memory_bytes() / 2**30, 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "gpus": _gpus(),
        },
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy does; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(name: str, milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and p99 under the keys that `vllm bench serve --save-result` uses."""
    return {
        f"mean_{name}_ms": statistics.fmean(milliseconds) if milliseconds else 0.0,
        f"median_{name}_ms": statistics.median(milliseconds) if milliseconds else 0.0,
        f"std_{name}_ms": statistics.pstdev(milliseconds) if milliseconds else 0.0,
        f"p99_{name}_ms": percentile(milliseconds, 99),
    }


def write(result: dict[str, Any], output: str | None) -> None:
    """Print the figures; write all of it to `output` where one is given."""
    for key, value in result.items():
        if isinstance(value, float):
            print(f"{key:32} {value:12.2f}")
        elif isinstance(value, int | str) and value != "":
            print(f"{key:32} {value!s:>12}")
    if output:
        Path(output).write_text(json.dumps({**origin(), **result}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {output}")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
