"""The table of rotary angles."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.models.spec import RotarySpec


def rotary_table(spec: RotarySpec, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines and sines [max_position, 2, rotary_dim // 2] float32 of every position."""
    frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_position, dtype=torch.float32).unsqueeze(1) * frequencies
    # On several threads the first cosines of a process have other last bits now and then (of 400 processes that were
    # forked from one with torch, one): MKL chooses its code in the first call, and does not keep other threads out.
    # This table is made once, and then every number of these ranks is another one than before a crash.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * spec.attention_factor
    finally:
        torch.set_num_threads(num_threads)
    if spec.round_to_dtype:
        table = table.to(dtype)
    return table.to(device, torch.float32)
