"""The table of rotary angles."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.models.spec import RotarySpec


def rotary_table(spec: RotarySpec, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines [max_position, 2, rotary_dim // 2] float32 of every position."""
    frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_position, dtype=torch.float32).unsqueeze(1) * frequencies
    # In a process's first call on several threads one of them may get MKL's fast cosines, off by up to 1.5e-4: MKL
    # chooses its code then, and does not keep the others out (of 13,000 processes four). A rank would compute other
    # numbers than the one before it, as long as it lives.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * spec.attention_factor
    finally:
        torch.set_num_threads(num_threads)
    if spec.round_to_dtype:
        table = table.to(dtype)
    return table.to(device, torch.float32)
