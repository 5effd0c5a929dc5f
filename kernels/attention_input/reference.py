"""The definition: what the backend's own kernels do one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import AttentionInput, KernelBackend


def attention_input(kernels: KernelBackend, heads: Tensor, given: AttentionInput) -> Tensor:
    """See `KernelBackend.attention_input`."""
    num_kv_heads = (heads.shape[1] - given.num_heads) // 2
    query, key, value = torch.split(heads, [given.num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = given.norms
    if norms is not None:
        query = kernels.rms_norm(query, norms.query_weight, norms.eps, norms.weight_offset)
        key = kernels.rms_norm(key, norms.key_weight, norms.eps, norms.weight_offset)
    kernels.rotary(query, key, given.positions, given.cos_sin)
    kernels.store_kv(key, value, given.key_cache, given.value_cache, given.slot_mapping)
    return query
