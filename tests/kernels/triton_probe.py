"""Small Triton kernels that show what device functions compute; needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling.triton_numbers import philox4x32_10


@triton.jit
def _philox_kernel(
    words,  # [6] int64: counter, then key
    out,  # [4] int64
):
    lane = tl.zeros([1], tl.int32)
    c0 = tl.load(words + lane).to(tl.uint32)
    c1 = tl.load(words + lane + 1).to(tl.uint32)
    c2 = tl.load(words + lane + 2).to(tl.uint32)
    c3 = tl.load(words + lane + 3).to(tl.uint32)
    k0 = tl.load(words + lane + 4).to(tl.uint32)
    k1 = tl.load(words + lane + 5).to(tl.uint32)
    r0, r1, r2, r3 = philox4x32_10(c0, c1, c2, c3, k0, k1)
    tl.store(out + lane, r0.to(tl.int64))
    tl.store(out + lane + 1, r1.to(tl.int64))
    tl.store(out + lane + 2, r2.to(tl.int64))
    tl.store(out + lane + 3, r3.to(tl.int64))


def philox_words(counter: tuple[int, ...], key: tuple[int, ...], device: torch.device) -> list[int]:
    """The four output words that the Triton kernels compute."""
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](torch.tensor([*counter, *key], device=device), out, enable_fp_fusion=False)
    return out.tolist()
