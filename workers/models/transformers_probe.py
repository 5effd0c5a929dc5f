"""Does a transformers model run over a paged KV cache? Asked once, when it is loaded, on prompts of a few tokens.

Three questions. Do its tokens see none behind them, and do they stand where we say that they stand? Is its attention
what the attention interface shows? That is computed as transformers' eager attention does, operation for operation:
hardly a bit differs, whatever the type, nor with a window that even these prompts outgrow. And does the paged cache
give the same? Its kernels add in another order, so that the type's own rounding has to be let pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, AttentionParams, KernelBackend
from novainfer.errors import UnsupportedModelError
from workers.models.base import ForwardBatch
from workers.models.spec import ModelSpec
from workers.models.transformers_backend import ATTENTION_NAME, TransformersModel, decoder_forward

BLOCK_SIZE = 16
PROMPT_LENS = (7, 4)  # two sequences in one step: neither may see the other
NUM_DECODES = 2  # the last tokens of each prompt are computed one by one
POSITION_TOLERANCE = 1e-2  # the same operations on the same numbers; on GPUs some add in any order
CAUSAL_TOLERANCE = 1e-2  # so much may what comes behind a token change, where experts multiply other numbers of rows
# Of a logit, relative to their spread, as all of these: 1e-3, and so many times what another order of adding changes.
SHOWN_TOLERANCE, ROUNDINGS = 1e-3, 2.0
_SHORT_WINDOW = 2
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}  # of the paged cache


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one layer's attention asked for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None


class RecordingStep:
    """Notes every call and answers with zeros."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        if layer in self.calls:
            raise UnsupportedModelError(f"layer {layer} has more than one attention")
        self.calls[layer] = LayerCall(query.shape[1], key.shape[1], key.shape[2], value.shape[2], params.sliding_window)
        return query.new_zeros(*query.shape[:2], value.shape[2])


class ShownStep:
    """Attends to one sequence, by what a call shows and as transformers' `eager_attention_forward` does.

    wide: with scores in float32, as a few older models have them. window: in place of any that a call shows.
    """

    def __init__(self, *, wide: bool, window: int | None = None) -> None:
        self._wide = wide
        self._window = window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """See `AttentionStep`."""
        group = query.shape[1] // key.shape[1]
        queries, keys, values = (
            heads.transpose(0, 1)
            for heads in (query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        )
        if self._wide:
            queries, keys = queries.float(), keys.float()
        scores = queries @ keys.transpose(1, 2) * params.scale
        if params.soft_cap is not None:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        places = torch.arange(query.shape[0], device=query.device)
        distance = places[:, None] - places[None, :]
        window = params.sliding_window and (self._window or params.sliding_window)
        hidden = (distance < 0) | (distance >= (window or query.shape[0]))
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return (weights @ values).transpose(0, 1)


def probe_spec(model: Any, name: str, dtype: torch.dtype, max_position: int) -> ModelSpec:
    """The sizes that the model's attention layers really use."""
    if model.get_decoder() is model.get_output_embeddings():
        raise UnsupportedModelError("transformers does not tell which part of it is the decoder")
    device = next(model.parameters()).device
    step = RecordingStep()
    vocab_size = model.get_output_embeddings().weight.shape[0]
    hidden = decoder_forward(model.get_decoder(), *_tokens(1, 0, device, vocab_size), step)
    layers = [step.calls[layer] for layer in sorted(step.calls)]
    if not layers or sorted(step.calls) != list(range(model.config.get_text_config().num_hidden_layers)):
        raise UnsupportedModelError("not every layer goes through transformers' attention interface")
    first = layers[0]
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in layers}
    if len(shapes) > 1 or first.value_dim > first.head_dim:
        raise UnsupportedModelError(f"its layers have different shapes (heads, kv heads, key, value): {shapes}")
    return ModelSpec(
        architecture=name,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden.shape[-1],
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        max_position=max_position,
        sliding_windows=tuple(call.sliding_window for call in layers),
    )


def check_against_eager(model: Any, paged: TransformersModel, kernels: KernelBackend, longest: int) -> None:
    """Raises `UnsupportedModelError` unless ragged prefill and decode give the logits of eager attention.

    longest: sequence that will be served, in tokens.
    """
    device = next(model.parameters()).device
    prompts = [_tokens(length, length, device, paged.spec.vocab_size)[0] for length in PROMPT_LENS]
    model.set_attn_implementation("eager")
    expected = torch.cat([_eager_logits(model, ids) for ids in prompts])
    _check_causal(model, prompts[0], expected[: len(prompts[0])])
    _check_positions(model, prompts[0], expected[: len(prompts[0])])
    model.set_attn_implementation(ATTENTION_NAME)
    logits = _paged_logits(paged, kernels, prompts, device)
    difference = _difference(logits, expected)
    if not difference <= TOLERANCE[paged.spec.dtype]:
        raise _hidden_attention(difference)
    for wide in (False, True):
        shown = torch.cat([_shown_logits(paged, ids, ShownStep(wide=wide)) for ids in prompts])
        difference = _difference(shown, expected)
        tolerance = SHOWN_TOLERANCE + ROUNDINGS * _difference(logits, shown)
        if difference <= tolerance:
            step = ShownStep(wide=wide, window=_SHORT_WINDOW)
            _check_window(model, paged, prompts[0], step, max(tolerance, CAUSAL_TOLERANCE), longest)
            return
    raise _hidden_attention(difference)


def _hidden_attention(difference: float) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"its logits differ from those of transformers' eager attention by {difference:.2g} of their spread; "
        "its attention does something that the attention interface does not show"
    )


def _check_causal(model: Any, ids: Tensor, logits: Tensor) -> None:
    """Raises `UnsupportedModelError` if an earlier token's logits [T, V] change with the last token."""
    others = _eager_logits(model, torch.cat([ids[:-1], ids[:1]]))
    difference = float((others - logits)[:-1].abs().max() / logits.std().clamp(min=1e-6))
    if difference > CAUSAL_TOLERANCE:  # NaN is not: that is found by the comparison
        raise UnsupportedModelError("its tokens see those behind them: it is an encoder, and does not generate text")


def _check_positions(model: Any, ids: Tensor, logits: Tensor) -> None:
    """Raises `UnsupportedModelError` if the logits [T, V] are others when the model is told that the first token is 0,
    as we number them. RoBERTa begins behind its padding id.
    """
    positions = torch.arange(len(ids), device=ids.device).unsqueeze(0)
    try:
        told = _eager_logits(model, ids, position_ids=positions)
    except TypeError:  # some hand them to the decoder alone, which the comparison asks
        return
    if _difference(told, logits) > POSITION_TOLERANCE:
        raise UnsupportedModelError("its positions do not begin at 0: it numbers its tokens in a way of its own")


def _check_window(
    model: Any, paged: TransformersModel, ids: Tensor, step: ShownStep, tolerance: float, longest: int
) -> None:
    """Raises `UnsupportedModelError` if the model's mask has a window that its calls do not show, or lacks one they do.

    These tokens are too few for it; so for a moment it gets a window that they are not. step: has the same.
    """
    config = paged.decoder.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window >= longest:
        return
    config.sliding_window = _SHORT_WINDOW
    model.set_attn_implementation("eager")
    try:
        masked = _eager_logits(model, ids)
        model.set_attn_implementation(ATTENTION_NAME)
        difference = _difference(_shown_logits(paged, ids, step), masked)
    finally:
        config.sliding_window = window
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"its window of {window} tokens is not the same in its mask and in what the attention interface shows: "
            f"serve it with --max-model-len {window}, where the window does not matter"
        )


def _eager_logits(model: Any, ids: Tensor, **more: Tensor) -> Tensor:
    """[T, V] float32."""
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False, **more).logits[0]
    return logits.float()


def _difference(logits: Tensor, expected: Tensor) -> float:
    """The largest between logits [T, V], relative to their spread; NaN if any is."""
    return float((logits - expected).abs().max() / expected.std().clamp(min=1e-6))


def _shown_logits(paged: TransformersModel, ids: Tensor, step: ShownStep) -> Tensor:
    """[T, V] float32."""
    positions = torch.arange(len(ids), device=ids.device)
    return paged.logits(decoder_forward(paged.decoder, ids, positions, step))


def _tokens(length: int, seed: int, device: torch.device, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Some valid token ids and their positions, both [length]."""
    positions = torch.arange(length, device=device)
    return (positions * 7 + seed * 3 + 5) % min(97, vocab_size), positions


def _paged_logits(
    paged: TransformersModel, kernels: KernelBackend, prompts: list[Tensor], device: torch.device
) -> Tensor:
    """Logits of all prompt tokens, prompt after prompt; the last tokens are computed one by one, as decodes."""
    spec = paged.spec
    caches = [
        kernels.allocate_kv_cache(len(prompts), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, spec.dtype, device)
        for _ in range(spec.num_layers)
    ]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    for step in range(1 + NUM_DECODES):
        counts = [len(prompt) - NUM_DECODES if step == 0 else 1 for prompt in prompts]
        spans = [slice(done, done + count) for done, count in zip(computed, counts, strict=True)]
        input_ids = torch.cat([prompt[span] for prompt, span in zip(prompts, spans, strict=True)])
        positions = torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])
        hidden = paged.forward(input_ids, positions, _batch(spans, step > 0, device), caches)
        for part, logits in zip(parts, torch.split(paged.logits(hidden), counts), strict=True):
            part.append(logits)
        computed = [span.stop for span in spans]
    return torch.cat([torch.cat(part) for part in parts])


def _batch(spans: list[slice], decode: bool, device: torch.device) -> ForwardBatch:
    """Sequence i owns block i alone."""
    slots = [i * BLOCK_SIZE + position for i, span in enumerate(spans) for position in range(span.start, span.stop)]
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + span.stop - span.start)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32, device=device),
        block_table=torch.arange(len(spans), dtype=torch.int32, device=device).unsqueeze(1),
        num_decodes=len(spans) if decode else 0,
        max_query_len=max(span.stop - span.start for span in spans),
        max_seq_len=max(span.stop for span in spans),
    )
    return ForwardBatch(metadata, torch.tensor(slots, device=device))
