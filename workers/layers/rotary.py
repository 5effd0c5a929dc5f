"""The table of rotary angles."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.models.spec import RotarySpec


def rotary_table(spec: RotarySpec, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines [max_position, 2, rotary_dim // 2] float32 of every position."""
    frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_position, dtype=torch.float32).unsqueeze(1) * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * spec.attention_factor
    if spec.round_to_dtype:
        table = table.to(dtype)
    return table.to(device, torch.float32)
