"""What the worker runtime sees of a model, whichever implementation stands behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.backend import AttentionMetadata, MakeSampling
from workers.models.spec import ModelSpec

KvCaches = list[tuple[Tensor, Tensor]]  # per layer (key_cache, value_cache), as the kernel backend allocated them


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Those of a step whose hidden states are wanted: the last layer does no more for others than store their KV."""

    index: Tensor  # [K] int64, in T, rising
    metadata: AttentionMetadata  # of these tokens alone, over the same contexts


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Where the tokens of one step belong; complete when built, passed down by argument."""

    metadata: AttentionMetadata
    slot_mapping: Tensor  # [T] int64, slot = block * block_size + offset, -1 = do not store
    kept: KeptTokens | None = None  # None: all


class CausalLM(Protocol):
    """A decoder over a paged KV cache. Holds weights only; all state of requests is in the arguments."""

    @property
    def progress(self) -> int:
        """Counts up, with every layer of every forward at least, for another thread that watches."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""
        ...

    @property
    def is_static(self) -> bool:
        """Whether a step of so many tokens is always the same kernels, and the host waits for none of them."""
        ...

    @property
    def num_local_kv_heads(self) -> int:
        """Key/value heads whose cache this rank holds."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, kv_caches: KvCaches) -> Tensor:
        """input_ids, positions [T] int64 -> hidden states [K, hidden] after the final norm. Writes this step's KV.

        K: the kept tokens, else all T.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] float32, after scaling and soft cap; all of it on every rank."""
        ...

    def pick(self, hidden: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """hidden [R, hidden] -> what `KernelBackend.choose` would make of their logits, without computing them all.

        None where that is not possible, or saves nothing.
        """
        ...
