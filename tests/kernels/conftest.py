"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    # Triton reads it when a kernel is defined, so it must stand before the first import of triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """The device that kernels are tested on."""
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def _products_of_any_shape_agree() -> Iterator[None]:
    """Triton's interpreter multiplies by numpy, whose fp32 sums differ with the number of rows on some processors.

    Unlike a GPU's: there a program's tile has one size. Summed in fp64 and rounded once they do not.
    """
    if DEVICE.type != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64)  # the kernels give it no bf16, which it has as integers
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` returns is full of NaN or of the largest integers, as unwritten memory may be."""
    empty = torch.empty

    def full(*args: Any, **keywords: Any) -> torch.Tensor:
        out = empty(*args, **keywords)
        if out.is_floating_point():
            return out.fill_(math.nan)
        return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", full)
