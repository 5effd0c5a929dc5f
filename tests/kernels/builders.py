"""Builders of kernel inputs, and the one table of tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams, KernelBackend, SamplingTensors
from kernels.kv_store.reference import to_float8
from kernels.reference_backend import ReferenceBackend

# Largest |got - wanted| / (1 + |wanted|). The interpreter truncates where hardware rounds fp32 to bf16, hence two ulps.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Every element of `got` within the tolerance of `dtype` of `wanted`; NaN never is."""
    error = (got.double() - wanted.double()).abs() / (1 + wanted.double().abs())
    assert bool((error <= TOLERANCE[dtype]).all()), f"largest error {error.max().item()}"


@dataclass(frozen=True)
class Heads:
    """The shape of one attention layer."""

    group: int = 1
    kv: int = 2
    dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    is_float8: bool = False  # the cache's numbers; keys and values are such numbers then


class Context:
    """Random sequences: their keys, values, and one query per position. Any step over them can be built from it."""

    def __init__(self, seq_lens: Sequence[int], heads: Heads, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(length: int, num_heads: int) -> Tensor:
            return torch.randn(length, num_heads, heads.dim, generator=generator).to(device, heads.dtype)

        self.heads = heads
        self.device = device
        self.seq_lens = list(seq_lens)

        def stored(length: int) -> Tensor:
            x = normal(length, heads.kv)
            return to_float8(x).to(heads.dtype) if heads.is_float8 else x

        self.keys = [stored(length) for length in seq_lens]
        self.values = [stored(length) for length in seq_lens]
        self.queries = [normal(length, heads.kv * heads.group) for length in seq_lens]
        self.max_blocks = max(-(-length // heads.block_size) for length in seq_lens) + 1
        self.num_blocks = self.max_blocks * len(self.seq_lens)
        shuffled = torch.randperm(self.num_blocks, generator=generator).to(torch.int32)
        self.block_table = shuffled.view(len(self.seq_lens), self.max_blocks).to(device)

    def caches(self, backend: KernelBackend) -> tuple[Tensor, Tensor]:
        """Caches in the layout of the reference or the Triton backend, NaN wherever no token of a sequence lies.

        They are filled here, not by the backend, because the interpreter takes a millisecond per token.
        """
        heads = self.heads
        shape = (self.num_blocks, heads.block_size, heads.kv, heads.dim)
        caches = ReferenceBackend().allocate_kv_cache(*shape, heads.dtype, self.device)
        for cache, tensors in zip(caches, (self.keys, self.values), strict=True):
            cache.fill_(float("nan"))
            for seq, tensor in enumerate(tensors):
                offsets = torch.arange(len(tensor), device=self.device)
                blocks = self.block_table[seq, offsets // heads.block_size].long()
                cache[blocks, offsets % heads.block_size] = tensor
        if backend.name != "triton":
            return caches
        keys, values = caches[0].transpose(1, 2).contiguous(), caches[1].transpose(1, 2).contiguous()
        return (to_float8(keys), to_float8(values)) if heads.is_float8 else (keys, values)

    def step(self, spans: Sequence[tuple[int, int, int]], num_decodes: int) -> tuple[Tensor, AttentionMetadata]:
        """Query rows and metadata of one step; a span is (sequence, first position, end position)."""
        lengths = [end - first for _, first, end in spans]
        seqs = [seq for seq, _, _ in spans]
        ends = [end for _, _, end in spans]

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        metadata = AttentionMetadata(
            query_start_loc=ints([sum(lengths[:i]) for i in range(len(lengths) + 1)]),
            seq_lens=ints(ends),
            block_table=self.block_table[seqs],
            num_decodes=num_decodes,
            max_query_len=max(lengths),
            max_seq_len=max(ends),
        )
        return torch.cat([self.queries[seq][first:end] for seq, first, end in spans]), metadata

    def attend(
        self,
        backend: KernelBackend,
        spans: Sequence[tuple[int, int, int]],
        num_decodes: int,
        params: AttentionParams,
    ) -> Tensor:
        """The backend's attention of one step, into an output full of NaN."""
        if params.sinks is not None:
            params = replace(params, sinks=params.sinks.to(self.device))
        query, metadata = self.step(spans, num_decodes)
        out = torch.full_like(query, float("nan"))
        returned = backend.paged_attention(query, *self.caches(backend), metadata, params, out)
        assert returned is out
        return out

    def oracle(self, spans: Sequence[tuple[int, int, int]], params: AttentionParams) -> Tensor:
        """The reference attention of the same step on inputs widened to float64."""
        wide = object.__new__(Context)
        wide.__dict__.update(self.__dict__)
        wide.heads = replace(self.heads, dtype=torch.float64)
        for name in ("keys", "values", "queries"):
            setattr(wide, name, [tensor.double() for tensor in getattr(self, name)])
        return wide.attend(ReferenceBackend(), spans, 0, params)


def sampling_tensors(device: torch.device, num_rows: int, **columns: Sequence[float]) -> SamplingTensors:
    """Greedy-free defaults for every column that is not given; a column shorter than num_rows is repeated."""
    defaults = {"temperature": [1.0], "top_k": [0], "top_p": [1.0], "min_p": [0.0]}
    defaults |= {"seed": [0], "choice": [0], "index": [0]}
    dtypes = {"top_k": torch.int32, "choice": torch.int32, "seed": torch.int64, "index": torch.int64}
    unknown = columns.keys() - defaults.keys()
    assert not unknown, unknown
    tensors = {}
    for field in fields(SamplingTensors):
        values = list(columns.get(field.name, defaults[field.name]))
        repeated = [values[row % len(values)] for row in range(num_rows)]
        tensors[field.name] = torch.tensor(repeated, dtype=dtypes.get(field.name, torch.float32), device=device)
    return SamplingTensors(**tensors)
