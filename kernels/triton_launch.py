"""What every Triton kernel of ours shares: whether Triton interprets, and rounding of block sizes.

Every launch passes `enable_fp_fusion=False`: which products and sums the compiler would contract may differ from
kernel to kernel and from version to version, and with it the last bit.
Integers that differ from step to step are not specialised on: a new version of a kernel, for one of 1 or for a
multiple of 16, would be compiled while requests wait.
Importing this module imports triton, so only the Triton modules may import it.
"""

from __future__ import annotations

import os

import torch
from triton.language.extra import cuda

# Triton reads the variable when a kernel is defined. Interpreted kernels run on CPU tensors through NumPy.
INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def next_power_of_2(value: int, at_least: int = 1) -> int:
    """The smallest power of two that is neither below `value` nor below `at_least`."""
    return max(at_least, 1 << max(value - 1, 0).bit_length())


def num_processors(device: torch.device) -> int:
    """Of a GPU; interpreted, a few, so that programs have more than one thing to do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can be started while the one before it still runs (programmatic dependent launch)."""
    if device.type != "cuda" or not hasattr(cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def warps_for(elements: int) -> int:
    """Warps of a program that works on `elements` at once: 8 elements a thread, 1 to 16 warps."""
    return min(16, max(1, next_power_of_2(elements) // 256))
