"""Sampling parameters of the persistent rows, in the form that a step gathers them from.

Lives in the worker. Scalars are host arrays indexed by row (a step uploads those of the rows it samples); token id
lists are device tensors that only rows with such lists have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.backend import SamplingTensors
from novainfer.errors import EngineError
from novainfer.protocol.step import NewRow

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from workers.grammars import Form

IntArray = npt.NDArray[np.int64]

NO_LOGPROBS = -1


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on `device`; on a CPU it shares memory with the array, on a GPU the copy does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(slots=True)
class RowGrammar:
    """A row's. form: what is built of the text. matcher: a copy of its, which has consumed the row's first num_seen
    output tokens; None: not asked yet. is_second: it has begun again with a form of its own.

    num_masks: how often it has said what may come. seconds: of CPU time, for all of this. fault: why it is given up, in
    words; empty: it is not. refusal: why its request is to blame for that (see `StepResult.refused`); empty: it is not.
    end_ids: what ends the row beside the ids that it asked for.
    """

    text: str
    end_ids: frozenset[int]
    form: Form | None = None
    matcher: LLMatcher | None = None
    is_second: bool = False
    num_seen: int = 0
    num_masks: int = 0
    seconds: float = 0.0
    fault: str = ""
    refusal: str = ""

    def begin_again(self, form: Form) -> None:
        """With another form than it had. What it took counts on."""
        self.form, self.matcher = form, None
        self.num_seen = 0
        self.fault = self.refusal = ""
        self.is_second = True

    @classmethod
    def of(cls, new: NewRow) -> RowGrammar | None:
        """None for a row that has none."""
        params = new.params
        if not params.grammar:
            return None
        return cls(params.grammar, frozenset(new.stop_token_ids) - frozenset(params.stop_token_ids))


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What one row's logits go through beside penalties. Absent lists are None."""

    bias_ids: Tensor | None  # [num_biased] int64
    bias_values: Tensor | None  # [num_biased] float32
    allowed_ids: Tensor | None  # [num_allowed] int64: only these may be sampled
    banned_ids: Tensor | None  # [num_banned] int64
    early_stop_ids: Tensor | None  # [num_stops] int64: not sampled before min_tokens outputs
    min_tokens: int
    grammar: RowGrammar | None = None

    @classmethod
    def of(cls, new: NewRow, device: torch.device) -> TokenRules | None:
        """The rules of a row, or None for a row that has none.

        A ban of stop ids that would leave nothing of `allowed_token_ids` is void: such a row may only ever stop.
        """
        params = new.params
        allowed, banned, stops = params.allowed_token_ids, set(params.banned_token_ids), new.stop_token_ids
        if allowed is not None:
            allowed = tuple(sorted(set(allowed) - banned))
            banned = set()
            if set(allowed) <= set(stops):
                stops = []
        if params.min_tokens == 0:
            stops = []
        grammar = RowGrammar.of(new)
        if not params.logit_bias and allowed is None and not banned and not stops and grammar is None:
            return None

        def ids(values: list[int]) -> Tensor | None:
            return to_device(np.array(values, np.int64), device) if values else None

        biases = np.array(list(params.logit_bias.values()), np.float32)
        return cls(
            bias_ids=ids(list(params.logit_bias)),
            bias_values=to_device(biases, device) if params.logit_bias else None,
            allowed_ids=None if allowed is None else ids(list(allowed)),
            banned_ids=ids(sorted(banned)),
            early_stop_ids=ids(sorted(set(stops))),
            min_tokens=params.min_tokens,
            grammar=grammar,
        )


@dataclass(slots=True)
class RowSelection:
    """What the sampling of some rows [B] needs to know, as long as no row gets a new owner."""

    _owner: SamplingRows
    _rows: IntArray
    num_logprobs: IntArray  # [B], NO_LOGPROBS for none
    logprob_positions: IntArray  # [L], in B: where some are asked for
    is_plain: bool  # no rules, no penalties: the logits are sampled as they are
    _tensors: SamplingTensors | None = None  # made when they are first asked for

    def at(self, output_index: IntArray, device: torch.device) -> SamplingTensors:
        """What the sampling kernel takes; output_index [B] is the index of the token to sample.

        On a CPU these are the same tensors every time: they hold until the next call.
        """
        if self._tensors is None:
            self._tensors = self._owner.tensors(self._rows)
        if device.type != "cpu":
            return replace(self._tensors, index=to_device(output_index, device))
        self._tensors.index.numpy()[:] = output_index
        return self._tensors


class SamplingRows:
    """Sampling parameters of every row; `set` is the only writer, beside `forget`."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        floats, integers = np.zeros((3, max_num_seqs), np.float32), np.zeros((3, max_num_seqs), np.int64)
        # The same on the device, as `kernels.backend.PersistentRows` has them; on a CPU the same memory.
        self.floats, self.integers = to_device(floats, device), to_device(integers, device)
        self._floats, self._integers = floats, integers
        # All arrays: [max_num_seqs].
        self.temperature, self.top_p, self.min_p = floats
        self.top_k, self.choice, self.seed = integers
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self.has_rules = np.zeros(max_num_seqs, np.bool_)
        self.rules: list[TokenRules | None] = [None] * max_num_seqs
        self._selected: tuple[bytes, RowSelection] | None = None  # the last ones

    def set(self, new: NewRow) -> None:
        """Take a new row's parameters; every field of the row's former owner is overwritten."""
        row, params = new.row, new.params
        if params.seed is None:
            raise EngineError(f"row {row}: the seed was not resolved")
        self._selected = None
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.choice[row] = new.choice
        if self._device.type != "cpu":
            self.floats[:, row] = to_device(self._floats[:, row].copy(), self._device)
            self.integers[:, row] = to_device(self._integers[:, row].copy(), self._device)
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.rules[row] = TokenRules.of(new, self._device)
        self.has_rules[row] = self.rules[row] is not None

    def forget(self, row: int) -> None:
        """Its owner is gone: what others may hold as long as it does is let go."""
        self.rules[row] = None
        self.has_rules[row] = False

    def select(self, rows: IntArray) -> RowSelection:
        """Of `rows` [B]. Many steps in a row sample the same ones: then it is what it was the last time."""
        key = rows.tobytes()
        if self._selected is None or self._selected[0] != key:
            self._selected = key, self._select(rows)
        return self._selected[1]

    def _select(self, rows: IntArray) -> RowSelection:
        num_logprobs = self.num_logprobs[rows]
        penalties = (self.repetition_penalty[rows] != 1.0, self.presence_penalty[rows], self.frequency_penalty[rows])
        return RowSelection(
            self,
            rows,
            num_logprobs=num_logprobs,
            logprob_positions=np.flatnonzero(num_logprobs >= 0),
            is_plain=not (self.has_rules[rows].any() or any(values.any() for values in penalties)),
        )

    def tensors(self, rows: IntArray) -> SamplingTensors:
        """Of `rows` [B], with an index of zeros."""
        return SamplingTensors(
            temperature=to_device(self.temperature[rows], self._device),
            top_k=to_device(self.top_k[rows].astype(np.int32), self._device),
            top_p=to_device(self.top_p[rows], self._device),
            min_p=to_device(self.min_p[rows], self._device),
            seed=to_device(self.seed[rows], self._device),
            choice=to_device(self.choice[rows].astype(np.int32), self._device),
            index=to_device(np.zeros_like(rows), self._device),
        )
