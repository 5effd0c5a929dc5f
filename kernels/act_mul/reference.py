"""Gated activation in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.checks import check_act_mul


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate]; fp32, rounded once."""
    intermediate = check_act_mul(gate_up, activation)
    gate, up = gate_up[:, :intermediate].float(), gate_up[:, intermediate:].float()
    if activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * up).to(gate_up.dtype)
