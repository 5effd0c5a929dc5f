"""The one decoder that runs every family we have a spec for."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from kernels.backend import MakeSampling, Program
from kernels.linear.schemes import head_scheme
from kernels.weights import Deferred
from workers.layers.attention import Attention, HeadShard
from workers.layers.build import LayerBuilder
from workers.layers.embedding import VocabEmbedding, VocabProjection, vocab_rows
from workers.layers.mlp import Mlp
from workers.layers.moe import MixtureOfExperts
from workers.layers.norm import RmsNorm
from workers.layers.rotary import rotary_table
from workers.models.base import ForwardBatch, KeptTokens, KvCaches
from workers.models.program import LayerProgram, Place, record_layers
from workers.models.spec import DecoderSpec, MoeSpec


class Decoder:
    """See `workers.models.base.CausalLM`. max_position: rows of the rotary tables."""

    def __init__(self, build: LayerBuilder, spec: DecoderSpec, max_position: int) -> None:
        self.spec = spec
        self._layers_done = 0
        self.num_local_kv_heads = HeadShard.of(spec, build.tp).num_kv_heads
        embedding_rows = _load_embedding(build, spec)
        self._embedding = VocabEmbedding(embedding_rows, build.tp, spec.embedding_multiplier)
        tables = {rotary: rotary_table(rotary, max_position, spec.dtype, build.device) for rotary in set(spec.rotaries)}
        self._layers = [
            DecoderLayer(build, spec, layer, tables[spec.rotaries[layer]]) for layer in range(spec.num_layers)
        ]
        self._norm = _norm(build, spec, f"{spec.prefix}norm")
        self._head = _load_head(build, spec, embedding_rows)
        self._kernels = build.kernels
        self._recorded: tuple[KvCaches, LayerProgram] | None = None
        # Of caches over which nothing can be recorded, the first tensor: they are not kept alive for that.
        self._unrecorded: weakref.ref[Tensor] | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, kv_caches: KvCaches) -> Tensor:
        """As `CausalLM`."""
        program = self._program_for(kv_caches)
        if program is not None and len(input_ids) <= program.capacity:
            self._embedding.write(input_ids, program.place.residual[: len(input_ids)])
            return program(positions, batch)
        residual = self._embedding(input_ids)
        update: Tensor | None = None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            kept = batch.kept if layer is self._layers[-1] else None
            residual, update = layer(residual, update, positions, batch, kv_cache, kept)
            self._layers_done += 1
        return _next_input(self._norm, residual, update)[0] if len(residual) else residual

    @property
    def progress(self) -> int:
        """See `CausalLM`."""
        program = None if self._recorded is None else self._recorded[1]
        return self._layers_done + (0 if program is None else program.program.num_done)

    @property
    def is_static(self) -> bool:
        """See `CausalLM`: the host looks which experts are chosen."""
        return not any(isinstance(mlp, MoeSpec) for mlp in self.spec.mlps)

    def _program_for(self, kv_caches: KvCaches) -> LayerProgram | None:
        """The layers over these caches as one call, recorded at first; None if they cannot be."""
        if self._recorded is not None and self._recorded[0] is kv_caches:
            return self._recorded[1]
        first = kv_caches[0][0]
        if self._unrecorded is not None and self._unrecorded() is first:
            return None
        program = record_layers(self._kernels, self._layers, self._norm, self.spec, kv_caches)
        if program is None:
            self._recorded, self._unrecorded = None, weakref.ref(first)
        else:
            self._recorded = (kv_caches, program)
        return program

    def pick(self, hidden: Tensor, params: MakeSampling) -> tuple[Tensor, Tensor] | None:
        """See `CausalLM`."""
        return self._head.pick(hidden, params)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] float32."""
        spec = self.spec
        if spec.has_plain_logits:
            return self._head.in_float32(hidden)
        logits = self._head(hidden)
        if spec.logits_divisor != 1.0:
            logits = logits / spec.logits_divisor
        if spec.logits_soft_cap is not None:
            logits = torch.tanh(logits / spec.logits_soft_cap) * spec.logits_soft_cap
        return logits.float().contiguous()


class DecoderLayer:
    """Attention, then MLP, each with an optional norm before and after it.

    The residual stream travels as (residual, update): their sum is taken together with the next norm.
    """

    def __init__(self, build: LayerBuilder, spec: DecoderSpec, layer: int, cos_sin: Tensor) -> None:
        names, name = spec.norms, f"{spec.prefix}layers.{layer}"
        self._before_attention = _optional_norm(build, spec, name, names.before_attention)
        self._attention = Attention(build, spec, layer, cos_sin)
        self._after_attention = _optional_norm(build, spec, name, names.after_attention)
        self._before_mlp = _optional_norm(build, spec, name, names.before_mlp)
        mlp = spec.mlps[layer]
        self._mlp = (
            MixtureOfExperts(build, spec, mlp, layer) if isinstance(mlp, MoeSpec) else Mlp(build, spec, mlp, layer)
        )
        self._after_mlp = _optional_norm(build, spec, name, names.after_mlp)
        self._residual_multiplier = spec.residual_multiplier

    def __call__(
        self,
        residual: Tensor,  # [T, hidden]
        update: Tensor | None,  # [T, hidden], not yet added to the residual
        positions: Tensor,  # [T]
        batch: ForwardBatch,
        kv_cache: tuple[Tensor, Tensor],
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        """The residual before, and the update by, this layer's MLP; of the kept tokens."""
        x, residual = _next_input(self._before_attention, residual, update)
        query, metadata = self._attention.take_in(x, positions, batch.slot_mapping, kv_cache), batch.metadata
        if kept is not None:
            query, residual, metadata = query[kept.index], residual[kept.index], kept.metadata
            if not len(residual):
                return residual, residual
        update = self._finish(self._attention.attend(query, metadata, kv_cache), self._after_attention)
        x, residual = _next_input(self._before_mlp, residual, update)
        return residual, self._finish(self._mlp(x), self._after_mlp)

    def record(
        self, program: Program, place: Place, kv_cache: tuple[Tensor, Tensor], *, is_first: bool, is_last: bool
    ) -> None:
        """The call, for `program`. Raises ValueError if it has a part that cannot be recorded."""
        if self._residual_multiplier != 1.0 or not isinstance(self._mlp, Mlp):
            raise ValueError("a scaled residual or a mixture of experts cannot be recorded")
        place.next_input(program, self._before_attention, has_update=not is_first)
        query = self._attention.record_take_in(program, place.x, kv_cache)
        if is_last:
            program.keep(place.residual, query)
        self._attention.record_attend(program, query, place.update, kv_cache)
        place.norm_update(program, self._after_attention)
        place.next_input(program, self._before_mlp, has_update=True)
        self._mlp.record(program, place.x, place.update)
        place.norm_update(program, self._after_mlp)

    def _finish(self, update: Tensor, norm: RmsNorm | None) -> Tensor:
        if norm is not None:
            update = norm(update)
        return update if self._residual_multiplier == 1.0 else update * self._residual_multiplier


def _load_embedding(build: LayerBuilder, spec: DecoderSpec) -> Tensor:
    """What tokens are looked up in. Where it is tied to the vocabulary projection, either may be stored alone."""
    module = f"{spec.prefix}embed_tokens"
    if spec.tie_word_embeddings and not build.holds(module) and build.holds(spec.lm_head):
        module = spec.lm_head
    return build.table(vocab_rows(build, module, spec.vocab_size, spec.hidden_size))


def _load_head(build: LayerBuilder, spec: DecoderSpec, embedding_rows: Tensor) -> VocabProjection:
    """The vocabulary projection. Like transformers we take a tied one from the checkpoint if it is stored there too.

    With quantised layers it becomes int8, also where they are int4: its errors go straight into the logits.
    """
    rows: Tensor | Deferred = embedding_rows
    if not spec.tie_word_embeddings or build.holds(spec.lm_head):
        rows = vocab_rows(build, spec.lm_head, spec.vocab_size, spec.hidden_size)
        if build.kernels.weight_memory is None:  # what is not packed may be shared
            stored = rows.make()
            rows = embedding_rows if torch.equal(stored, embedding_rows) else stored
    scheme, kernels = head_scheme(build.scheme), build.kernels
    if build.tp.world_size == 1 and spec.has_plain_logits:
        linear = kernels.pack_head(rows, scheme)
    else:  # who has but a part of the vocabulary, or changes its logits, picks nothing
        linear = kernels.pack_linear(rows, None, scheme)
    return VocabProjection(kernels, linear, build.tp, spec.vocab_size)


def _next_input(norm: RmsNorm | None, residual: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    """(input of the next part, residual with the update added)."""
    if update is None:
        return (residual if norm is None else norm(residual)), residual
    if norm is not None:
        return norm.add(update, residual)
    residual = residual + update
    return residual, residual


def _norm(build: LayerBuilder, spec: DecoderSpec, name: str) -> RmsNorm:
    weight = build.vector(f"{name}.weight", spec.hidden_size)
    return RmsNorm(build.kernels, weight, spec.norm_eps, spec.norm_weight_offset)


def _optional_norm(build: LayerBuilder, spec: DecoderSpec, layer_name: str, norm_name: str | None) -> RmsNorm | None:
    return None if norm_name is None else _norm(build, spec, f"{layer_name}.{norm_name}")
