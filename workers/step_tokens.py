"""How many tokens one step computes at most, where the configuration does not say."""

from __future__ import annotations

import torch

from novainfer.config import SchedulerConfig
from workers.models.spec import ModelSpec

MOST_STEP_TOKENS = 2048
_FEWEST = 256  # linear layers need so many rows at once for their full rate
_SECONDS = 0.5
_OPERATIONS_PER_THREAD = 150e9  # a second; a core of twice or half that speed gets steps of half or twice the time


def step_tokens(config: SchedulerConfig, spec: ModelSpec, device: torch.device, num_threads: int) -> int:
    """What is configured, or else what keeps a GPU busy, or a CPU not for long: others wait for the end of the step.

    num_threads: of all ranks.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    most = MOST_STEP_TOKENS
    if device.type == "cpu":
        operations = 2 * 12 * spec.num_layers * spec.hidden_size**2  # of a token, for the usual proportions
        affordable = int(_SECONDS * num_threads * _OPERATIONS_PER_THREAD / operations) // _FEWEST * _FEWEST
        most = min(most, max(affordable, _FEWEST))
    return max(most, config.max_num_seqs)
