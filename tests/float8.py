"""FP8 checkpoints written by the rules of their formats, beside the weights that they define.

The rules: `Fp8Dequantize` of transformers' integrations/finegrained_fp8.py; AutoFP8's auto_fp8/quantize.py; and of
compressed-tensors its quantization/lifecycle/forward.py and compressors/naive_quantized/base.py. A weight is the
float32 product of its number and its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.quantized import compressed_config


@dataclass(frozen=True, kw_only=True)
class Float8:
    """One way to store a weight in e4m3 numbers."""

    form: str  # fp8, float-quantized
    block: tuple[int, int] | None = None  # rows and columns of a scale
    per_tensor: bool = False  # neither: a row has one scale, or a group of it
    group: int | None = None
    scale_dtype: torch.dtype = torch.float32
    scale_name: str = "weight_scale"
    is_scalar: bool = False  # the scale of a tensor is no list of one

    def __str__(self) -> str:
        size = self.block or ("tensor" if self.per_tensor else self.group or "channel")
        return "-".join(
            [self.form, str(size), str(self.scale_dtype)[6:], self.scale_name] + ["scalar"] * self.is_scalar
        )

    def config(self) -> dict[str, Any]:
        """For config.json."""
        if self.form == "fp8":
            block = None if self.block is None else list(self.block)
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
        strategy = "block" if self.block else "tensor" if self.per_tensor else "group" if self.group else "channel"
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        weights |= {"group_size": self.group, "block_structure": self.block and list(self.block)}
        return compressed_config(self.form, weights)

    def write(
        self, module: str, shape: tuple[int, int], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """A random weight [N, K]: its tensors by name, and the float32 numbers that they stand for, in float64."""
        n, k = shape
        rows, columns = self.block or (n if self.per_tensor else 1, self.group or k)
        numbers = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        scales = 0.03 + 0.06 * torch.rand(-(-n // rows), -(-k // columns), generator=generator)
        scales = scales.to(self.scale_dtype)
        each = scales.float().repeat_interleave(rows, dim=0)[:n].repeat_interleave(columns, dim=1)[:, :k]
        stored = scales if not self.per_tensor else scales.reshape(() if self.is_scalar else (1,))
        tensors = {f"{module}.weight": numbers, f"{module}.{self.scale_name}": stored.contiguous()}
        return tensors, (numbers.float() * each).double()
