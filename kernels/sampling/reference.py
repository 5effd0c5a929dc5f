"""Sampling in plain torch, one row at a time, masses in float64. `kernels.sampling` states the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.checks import check_sampling

_MASK = 0xFFFFFFFF
_LARGEST = torch.finfo(torch.float32).max


def philox4x32_10(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten Philox rounds over unsigned 32-bit words, which int64 tensors and integers hold."""
    c0, (k0, k1) = counter[0], key
    c1, c2, c3 = (torch.full_like(c0, word) for word in counter[1:])
    for _ in range(10):
        # The int64 products wrap, but all their 64 bits are right: shift and mask read the two halves.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (second >> 32) & _MASK ^ c1 ^ k0,
            second & _MASK,
            (first >> 32) & _MASK ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(vocab_size: int, seed: int, choice: int, index: int, device: torch.device) -> Tensor:
    """The Gumbel noise of every token id: [vocab_size] float32."""
    groups = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=device)
    words = philox4x32_10((groups, index & _MASK, choice & _MASK, 0), (seed & _MASK, (seed >> 32) & _MASK))
    bits = torch.stack(words, dim=1).flatten()[:vocab_size]
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [B, V] float32 -> [B] int64 token ids."""
    check_sampling(logits, params)
    tokens = [_sample_row(logits[row], params, row) for row in range(logits.shape[0])]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _sample_row(logits: Tensor, params: SamplingTensors, row: int) -> int:
    """logits [V] and the parameters of one row -> token id."""
    logits = torch.where(logits.isnan(), -math.inf, logits)
    temperature = params.temperature[row]  # stays an fp32 tensor: the division must round in fp32
    if temperature == 0:
        return _first_argmax(logits)
    x = (logits / temperature).clamp(max=_LARGEST)
    kept = _kept_ids(x, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]))
    noise = gumbel(x.shape[0], int(params.seed[row]), int(params.choice[row]), int(params.index[row]), x.device)
    noisy = torch.full_like(x, -math.inf)
    noisy[kept] = (x + noise)[kept]
    return _first_argmax(noisy)


def _first_argmax(values: Tensor) -> int:
    """The lowest index of the largest value; torch.argmax does not promise which one it returns."""
    return int((values == values.max()).nonzero()[0])


def _kept_ids(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The ids that top_k, top_p and min_p leave of x [V], in the order x descending, id ascending."""
    order = torch.sort(x, descending=True, stable=True).indices
    if x[order[0]] == -math.inf:
        return order
    if top_k > 0:
        order = order[:top_k]
    masses = torch.exp((x[order] - x[order[0]]).double())
    if top_p < 1.0:
        sums = masses.cumsum(0)
        length = int((sums < top_p * sums[-1]).sum()) + 1
        order, masses = order[:length], masses[:length]
    return order[masses >= min_p]


def without_bad_rows(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What `KernelBackend.choose` gives for logits [B, V] of which token_ids [B] were sampled; on their device."""
    tops = logits.masked_fill(logits.isnan(), math.inf).amax(dim=1)  # -inf for some ids is a legal mask
    is_bad = tops.isinf()
    return token_ids.masked_fill(is_bad, 0), is_bad
