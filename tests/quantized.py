"""Quantised checkpoints written by the rules of their formats, beside the weights that they define in float64.

The rules, read in the formats' own sources and written anew here, one integer at a time:
- GPTQ: `pack` of AutoGPTQ's auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (v1: `zeros -= 1`), without which it is v2
  (GPTQModel's gptqmodel/utils/model.py, `convert_gptq_v2_to_v1_format_module`).
- AWQ: `from_linear` of AutoAWQ's awq/modules/linear/gemm.py (`order_map`).
- compressed-tensors: `pack_to_int32` of its compressors/quantized_compressors/pack_quantized.py; naive_quantized.py.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.builders import edit_config
from workers.quantized.scheme import StoredScheme, read_scheme

AWQ_ORDER_MAP = (0, 2, 4, 6, 1, 3, 5, 7)


class Written(Protocol):
    """One way to store a quantised weight."""

    def config(self) -> dict[str, Any]:
        """For config.json."""
        ...

    def write(
        self, module: str, shape: tuple[int, int], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """A random weight [N, K]: its tensors by name, and what they stand for in float64."""
        ...


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to store integers."""

    form: str  # gptq, gptq_v2, awq, pack-quantized, int-quantized
    bits: int = 4
    group: int = 32  # -1: a row has one scale
    symmetric: bool = False
    reordered: bool = False  # columns in another order than that of their groups
    per_tensor: bool = False
    scale_dtype: torch.dtype = torch.float16

    def __str__(self) -> str:
        size = "tensor" if self.per_tensor else self.group
        words = [self.form, f"{self.bits}bit", f"g{size}", "sym" if self.symmetric else "asym"]
        return "-".join(words + ["reordered"] * self.reordered + [str(self.scale_dtype)[6:]])

    def config(self) -> dict[str, Any]:
        """For config.json."""
        if self.form in ("gptq", "gptq_v2"):
            return {
                "quant_method": "gptq",
                "checkpoint_format": self.form,
                "bits": self.bits,
                "group_size": self.group,
                "sym": self.symmetric,
                "desc_act": self.reordered,
            }
        if self.form == "awq":
            return {
                "quant_method": "awq",
                "version": "gemm",
                "bits": self.bits,
                "group_size": self.group,
                "zero_point": not self.symmetric,
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "tensor" if self.per_tensor else "channel" if self.group == -1 else "group",
            "group_size": None if self.per_tensor or self.group == -1 else self.group,
            "actorder": "group" if self.reordered else None,
            "dynamic": False,
        }
        return compressed_config(self.form, weights)

    def write(
        self, module: str, shape: tuple[int, int], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """A random weight [N, K]: its tensors by name, and what they stand for in float64."""
        (n, k), half = shape, 1 << (self.bits - 1)
        num_groups = 1 if self.group == -1 or self.per_tensor else -(-k // self.group)
        order = torch.zeros(k, dtype=torch.int64) if num_groups == 1 else torch.arange(k) // self.group
        if self.reordered:
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]  # as layers of one input share
        codes = torch.randint(0, 2 * half, (n, k), generator=generator)
        codes[0, 0], codes[-1, -1] = 0, 2 * half - 1
        lowest = 1 if self.form == "gptq" else 0  # zero points of 0 cannot be told from others there
        zeros = torch.randint(lowest, 2 * half, (n, num_groups), generator=generator)
        if self.symmetric:
            zeros.fill_(half)
        scales = (0.4 + torch.rand(n, num_groups, generator=generator)) * (0.25 / half)
        if self.per_tensor:
            scales, zeros = scales[:1].expand(n, 1), zeros[:1].expand(n, 1)
        scales = scales.to(self.scale_dtype)
        exact = (codes - zeros[:, order]).double() * scales.double()[:, order]
        tensors = self._tensors(codes, zeros, scales)
        if self.form.startswith("gptq") or self.reordered:
            tensors["g_idx" if self.form.startswith("gptq") else "weight_g_idx"] = order.to(torch.int32)
        return {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, exact

    def _tensors(self, codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
        half = 1 << (self.bits - 1)
        if self.form.startswith("gptq"):
            stored = zeros - int(self.form == "gptq")
            return {
                "qweight": words(codes.T, self.bits, 0),
                "qzeros": words(stored.T, self.bits, 1),
                "scales": scales.T,
            }
        if self.form == "awq":
            return {
                "qweight": words(interleaved(codes.T), self.bits, 1),
                "qzeros": words(interleaved(zeros.T), self.bits, 1),
                "scales": scales.T,
            }
        scales, zeros = (scales[0], zeros[:1]) if self.per_tensor else (scales, zeros)
        tensors = {"weight_scale": scales}
        if self.form == "int-quantized":
            tensors["weight"] = (codes - half).to(torch.int8)
            if not self.symmetric:
                tensors["weight_zero_point"] = (zeros - half).to(torch.int8).view(scales.shape)
            return tensors
        tensors["weight_packed"] = words(codes, self.bits, 1)
        tensors["weight_shape"] = torch.tensor(codes.shape)
        if not self.symmetric and self.per_tensor:
            tensors["weight_zero_point"] = (zeros[0] - half).to(torch.int8)
        elif not self.symmetric:
            tensors["weight_zero_point"] = words(zeros, self.bits, 0)
        return tensors


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned integers [A, B] in words of 32 bits along `dim`, the first in the lowest bits; zeros fill the last."""
    rows = (codes if dim == 1 else codes.T).tolist()
    pack = 32 // bits
    packed = []
    for row in rows:
        filled = row + [0] * (-len(row) % pack)
        line = [
            sum(code << (bits * j) for j, code in enumerate(filled[i : i + pack])) for i in range(0, len(filled), pack)
        ]
        packed.append([word - (1 << 32) if word >> 31 else word for word in line])
    result = torch.tensor(packed, dtype=torch.int32)
    return result if dim == 1 else result.T


def interleaved(codes: Tensor) -> Tensor:
    """[A, B]: in each eight columns, the one that AWQ puts at each place of the word."""
    columns = [start + offset for start in range(0, codes.shape[1], 8) for offset in AWQ_ORDER_MAP]
    return codes[:, columns]


def quantize_checkpoint(folder: Path, how: Written, *, modules: str = "_proj") -> Path:
    """Replace a checkpoint's linear layers whose names end in `modules`; the folder of a twin with plain weights.

    The twin's weights are those in float32, which holds scale * integer exactly if the scales have 16 bits.
    """
    twin = folder.with_name(folder.name + "-plain")
    shutil.copytree(folder, twin)
    stored = load_file(folder / "model.safetensors")
    plain, generator = dict(stored), torch.Generator().manual_seed(7)
    for name in sorted(stored):
        module = name.removesuffix(".weight")
        if module.endswith(modules) and name.endswith(".weight"):
            n, k = stored.pop(name).shape
            tensors, exact = how.write(module, (n, k), generator)
            stored |= tensors
            plain[name] = exact.float()
    save_file(stored, folder / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    edit_config(folder, quantization_config=how.config())
    return twin


def scheme_of(quantization_config: dict[str, Any]) -> StoredScheme:
    """Of a config.json with it."""
    hf_config = SimpleNamespace(quantization_config=quantization_config)
    hf_config.get_text_config = lambda: hf_config
    scheme = read_scheme(hf_config)
    assert scheme is not None
    return scheme


def compressed_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """compressed-tensors', of linear layers with weights of one kind."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
