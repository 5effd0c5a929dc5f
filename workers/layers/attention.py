"""Grouped-query attention over the paged KV cache, split over the ranks by heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import AttentionInput, AttentionMetadata, AttentionParams, HeadNorms, KernelBackend, Program
from novainfer.checkpoint import split_fault
from novainfer.errors import UnsupportedModelError
from workers.layers.build import LayerBuilder, RowSlice
from workers.layers.norm import AllHeadsNorm, RmsNorm
from workers.models.spec import DecoderSpec
from workers.tensor_parallel import TensorParallel

HeadNorm = RmsNorm | AllHeadsNorm


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Which heads a rank holds. With more ranks than key/value heads, neighbouring ranks hold the same one."""

    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    first_head: int
    first_kv_head: int
    kv_replicas: int  # ranks that hold the same key/value heads

    @classmethod
    def of(cls, spec: DecoderSpec, tp: TensorParallel) -> HeadShard:
        """Raises `UnsupportedModelError` if the heads do not divide among the ranks."""
        fault = split_fault(spec.num_heads, spec.num_kv_heads, tp.world_size)
        if fault is not None:
            raise UnsupportedModelError(fault)
        heads = tp.shard(spec.num_heads, "attention heads")
        if tp.world_size > spec.num_kv_heads:
            replicas = tp.world_size // spec.num_kv_heads
            return cls(heads.stop - heads.start, 1, heads.start, tp.rank // replicas, replicas)
        kv_heads = tp.shard(spec.num_kv_heads, "key/value heads")
        return cls(heads.stop - heads.start, kv_heads.stop - kv_heads.start, heads.start, kv_heads.start, 1)


class Attention:
    """Projections, query/key norms, rotary embedding and paged attention of one layer."""

    def __init__(self, build: LayerBuilder, spec: DecoderSpec, layer: int, cos_sin: Tensor) -> None:
        name = f"{spec.prefix}layers.{layer}.self_attn"
        self._kernels: KernelBackend = build.kernels
        self._shard = HeadShard.of(spec, build.tp)
        self._head_dim = spec.head_dim
        self._qkv = build.merged_linear(_qkv_slices(spec, self._shard, name), spec.hidden_size, spec.qkv_bias)
        self._output = build.row_parallel_linear(
            f"{name}.o_proj", spec.num_heads * spec.head_dim, spec.hidden_size, spec.output_bias
        )
        self._query_norm = _head_norm(build, spec, f"{name}.q_norm", spec.num_heads, 1)
        self._key_norm = _head_norm(build, spec, f"{name}.k_norm", spec.num_kv_heads, self._shard.kv_replicas)
        self._norms = None  # of each head by itself
        if isinstance(self._query_norm, RmsNorm) and isinstance(self._key_norm, RmsNorm):
            self._norms = HeadNorms(
                self._query_norm.weight, self._key_norm.weight, spec.norm_eps, spec.norm_weight_offset
            )
        self._cos_sin = cos_sin  # [max_position, 2, rotary_dim // 2] float32
        self._params = AttentionParams(
            scale=spec.attention_scale,
            sliding_window=spec.sliding_windows[layer],
            soft_cap=spec.attention_soft_cap,
        )

    def take_in(self, x: Tensor, positions: Tensor, slot_mapping: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, hidden], positions, slot_mapping [T] -> queries [T, H, D]; keys and values go into kv_cache."""
        shard, head_dim = self._shard, self._head_dim
        heads = self._qkv(x).view(x.shape[0], shard.num_heads + 2 * shard.num_kv_heads, head_dim)
        key_cache, value_cache = kv_cache
        if isinstance(self._query_norm, AllHeadsNorm) and self._key_norm is not None:
            query, key, value = torch.split(heads, [shard.num_heads, shard.num_kv_heads, shard.num_kv_heads], dim=1)
            query, key = self._query_norm(query), self._key_norm(key)
            self._kernels.rotary(query, key, positions, self._cos_sin)
            self._kernels.store_kv(key, value, key_cache, value_cache, slot_mapping)
            return query
        return self._kernels.attention_input(
            heads,
            AttentionInput(
                shard.num_heads, self._norms, positions, self._cos_sin, key_cache, value_cache, slot_mapping
            ),
        )

    def attend(self, query: Tensor, metadata: AttentionMetadata, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [K, H, D] of the tokens of `metadata` -> [K, hidden]."""
        attended = self._kernels.paged_attention(query, *kv_cache, metadata, self._params)
        return self._output(attended.flatten(1))

    def record_take_in(self, program: Program, x: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """`take_in`, for `program`; returns the queries. Raises ValueError for norms over the heads of all ranks."""
        num_heads, num_kv_heads, head_dim = self._shard.num_heads, self._shard.num_kv_heads, self._head_dim
        qkv = program.buffer("qkv", (num_heads + 2 * num_kv_heads) * head_dim)
        program.linear(self._qkv, x, qkv)
        heads = qkv.view(program.capacity, -1, head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        for norm, part in ((self._query_norm, query), (self._key_norm, key)):
            if isinstance(norm, AllHeadsNorm):
                raise ValueError("a norm over the heads of all ranks cannot be recorded")
            if norm is not None:
                norm.record(program, part, part)
        program.rotary(query, key, self._cos_sin)
        program.store_kv(key, value, *kv_cache)
        return query

    def record_attend(self, program: Program, query: Tensor, out: Tensor, kv_cache: tuple[Tensor, Tensor]) -> None:
        """`attend`, for `program`."""
        attended = program.buffer("attended", query.shape[1] * query.shape[2])
        program.paged_attention(query, *kv_cache, self._params, attended.view(query.shape))
        self._output.record(program, attended, out)


def _qkv_slices(spec: DecoderSpec, shard: HeadShard, name: str) -> list[RowSlice]:
    """This rank's rows of queries, keys and values, from three matrices or from one that holds them in that order."""
    dim = spec.head_dim
    query_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    query = (shard.first_head * dim, (shard.first_head + shard.num_heads) * dim)
    kv = (shard.first_kv_head * dim, (shard.first_kv_head + shard.num_kv_heads) * dim)
    if not spec.packed_projections:
        return [
            RowSlice(f"{name}.q_proj", query_rows, *query),
            RowSlice(f"{name}.k_proj", kv_rows, *kv),
            RowSlice(f"{name}.v_proj", kv_rows, *kv),
        ]
    module, rows = f"{name}.qkv_proj", query_rows + 2 * kv_rows
    value_start = query_rows + kv_rows
    return [
        RowSlice(module, rows, *query),
        RowSlice(module, rows, query_rows + kv[0], query_rows + kv[1]),
        RowSlice(module, rows, value_start + kv[0], value_start + kv[1]),
    ]


def _head_norm(build: LayerBuilder, spec: DecoderSpec, name: str, num_heads: int, replicas: int) -> HeadNorm | None:
    """num_heads: over all ranks."""
    if spec.qk_norm == "none":
        return None
    size = spec.head_dim if spec.qk_norm == "head" else num_heads * spec.head_dim
    norm = RmsNorm(build.kernels, build.vector(f"{name}.weight", size), spec.norm_eps, spec.norm_weight_offset)
    return norm if spec.qk_norm == "head" else AllHeadsNorm(norm, build.tp, replicas)
