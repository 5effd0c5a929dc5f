"""From logits to token ids, for the rows that sample in a step.

Order: raw logits are captured for log-probabilities; logit_bias; repetition, presence and frequency penalties; allowed
and banned ids; stop ids before min_tokens; what the grammar forbids; then the sampling kernel (temperature, top_k,
top_p, min_p, Gumbel-max). Every stage treats each row by itself, so a row's token does not depend on the batch. A batch
of plain rows goes straight to the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.backend import KernelBackend, MakeSampling
from novainfer.protocol.step import NOT_FOLLOWED, RULED_OUT, NewRow
from workers.grammars import Grammars
from workers.logprobs import LogprobTensors, gather_logprobs
from workers.request_states import RequestStates
from workers.row_sampling import IntArray, TokenRules, to_device


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled for S rows, L of which asked for log-probabilities."""

    rows: IntArray  # [S]
    token_ids: Tensor  # [S] int64; 0 for a bad row
    is_bad: Tensor  # [S] bool: the row's logits are not finite, or leave no token to choose
    logprob_positions: IntArray  # [L], in S
    num_top: IntArray  # [L], alternatives asked for
    logprobs: LogprobTensors | None  # at those positions; None if L is 0
    is_ruled_out: Tensor | None = None  # [S] bool: bad, though the logits were finite; None: none is
    refusals: dict[int, str] = field(default_factory=dict)  # of rows without a mask: see `StepResult.refused`

    def only(self, kept: npt.NDArray[np.bool_]) -> Sampled:
        """Those of the S places that are kept [S]; on the host."""
        index = torch.from_numpy(np.flatnonzero(kept))
        with_logprobs = kept[self.logprob_positions]
        chosen = torch.from_numpy(np.flatnonzero(with_logprobs))
        return Sampled(
            rows=self.rows[kept],
            token_ids=self.token_ids[index],
            is_bad=self.is_bad[index],
            logprob_positions=(np.cumsum(kept) - 1)[self.logprob_positions[with_logprobs]],
            num_top=self.num_top[with_logprobs],
            logprobs=None if self.logprobs is None else self.logprobs.map(lambda tensor: tensor[chosen]),
            is_ruled_out=None if self.is_ruled_out is None else self.is_ruled_out[index],
            refusals=self.refusals,
        )

    def refused(self) -> dict[int, str]:
        """The rows that are bad though their logits were finite, and why; on the host."""
        if self.is_ruled_out is None:
            return {}
        rows = self.rows[self.is_ruled_out.numpy()].tolist()
        return {row: self.refusals.get(row, RULED_OUT) for row in rows}


NO_ROWS: IntArray = np.zeros(0, np.int64)

# What `CausalLM.pick` is of a step's hidden states.
Pick = Callable[[MakeSampling], tuple[Tensor, Tensor] | None]


class Sampler:
    """Stateless: all it knows of a row stands in `RequestStates`."""

    def __init__(self, kernels: KernelBackend, grammars: Grammars | None = None) -> None:
        """grammars: None: rows have none."""
        self._kernels = kernels
        self._grammars = grammars

    def expect(self, new_rows: Sequence[NewRow], states: RequestStates) -> None:
        """These rows have come: what some need that takes a while to get ready is begun with."""
        for new in new_rows if self._grammars is not None else ():
            rule = states.sampling.rules[new.row]
            if self._grammars is not None and rule is not None and rule.grammar is not None:
                self._grammars.expect(rule.grammar)

    def pick(self, pick: Pick, rows: IntArray, states: RequestStates, ahead: IntArray | None = None) -> Sampled | None:
        """What `sample` makes of the logits of these rows, without them; None where it needs them."""
        chosen = states.sampling.select(rows)
        if not chosen.is_plain or len(chosen.logprob_positions):
            return None
        picked = pick(lambda: chosen.at(states.output_len(rows, ahead), states.device))
        if picked is None:
            return None
        return Sampled(rows, *picked, chosen.logprob_positions, NO_ROWS, None)

    def sample(self, logits: Tensor, rows: IntArray, states: RequestStates, ahead: IntArray | None = None) -> Sampled:
        """Sample the next token of `rows` [S > 0] from logits [S, V] float32, which are changed in place.

        ahead [S]: how many drafts stand before that token; rows with penalties or a grammar have none.
        """
        chosen = states.sampling.select(rows)
        positions = chosen.logprob_positions
        position_index = to_device(positions, logits.device)
        raw = logits[position_index] if len(positions) else None
        output_len = states.output_len(rows, ahead)
        was_bad: Tensor | None = None
        is_ruled_out: Tensor | None = None
        refusals: dict[int, str] = {}
        if not chosen.is_plain:
            was_bad = ~(logits.sum(dim=1) < math.inf)  # what is done to them may hide it
            process_logits(logits, rows, states, output_len)
            refusals = self._follow_grammars(logits, rows, states)
        token_ids, is_bad = self._kernels.choose(logits, chosen.at(output_len, logits.device))
        if was_bad is not None:
            is_ruled_out = is_bad & ~was_bad
            is_bad |= was_bad
            token_ids.masked_fill_(is_bad, 0)
        logprobs = None
        if raw is not None:
            logprobs = gather_logprobs(raw, token_ids[position_index], int(chosen.num_logprobs.max()))
        num_top = chosen.num_logprobs[positions]
        return Sampled(rows, token_ids, is_bad, positions, num_top, logprobs, is_ruled_out, refusals)

    def _follow_grammars(self, logits: Tensor, rows: IntArray, states: RequestStates) -> dict[int, str]:
        """Set to -inf what the rows' grammars forbid in logits [S, V], in place.

        Returns the rows of which that is not known, and why.
        """
        refusals: dict[int, str] = {}
        if self._grammars is not None:
            self._grammars.begin_step()
        for i in np.flatnonzero(states.sampling.has_rules[rows]):
            row = int(rows[i])
            rule = states.sampling.rules[row]
            grammar = None if rule is None else rule.grammar
            if self._grammars is None or grammar is None:
                continue
            if not self._grammars.mask(logits[i], grammar, partial(states.output, row)):
                refusals[row] = grammar.refusal or NOT_FOLLOWED
        return refusals


def process_logits(logits: Tensor, rows: IntArray, states: RequestStates, output_len: IntArray) -> None:
    """Apply bias, penalties and token rules to logits [S, V] in place; rows that have none are not touched.

    output_len [S]: how many output tokens stand before the one to sample.
    """
    sampling = states.sampling
    with_rules = np.flatnonzero(sampling.has_rules[rows])
    repeated = np.flatnonzero(sampling.repetition_penalty[rows] != 1.0)
    counted = np.flatnonzero(
        ((sampling.presence_penalty[rows] != 0.0) | (sampling.frequency_penalty[rows] != 0.0)) & (output_len > 0)
    )
    rules = [(int(i), rule) for i in with_rules if (rule := sampling.rules[rows[i]]) is not None]
    for i, rule in rules:
        if rule.bias_ids is not None and rule.bias_values is not None:
            logits[i].index_add_(0, rule.bias_ids, rule.bias_values)
    if len(repeated):
        _penalise_repetition(logits, repeated, rows[repeated], states)
    if len(counted):
        _penalise_output(logits, counted, rows[counted], states)
    for i, rule in rules:
        _mask(logits[i], rule, int(output_len[i]))


def _history(rows: IntArray, start: IntArray, states: RequestStates) -> tuple[Tensor, Tensor]:
    """Token ids of `rows` [B] from position start [B] to their ends: ids [B, L] int64, is_real [B, L] bool.

    Shorter rows are padded with their last token. Every row must have at least one token there.
    """
    lengths = states.num_tokens[rows] - start
    offsets = np.arange(lengths.max())
    positions = start[:, None] + np.minimum(offsets, lengths[:, None] - 1)
    row_index = to_device(rows[:, None], states.device)
    ids = states.token_ids[row_index, to_device(positions, states.device)].long()
    return ids, to_device(offsets < lengths[:, None], states.device)


def _penalise_repetition(logits: Tensor, positions: IntArray, rows: IntArray, states: RequestStates) -> None:
    """Divide positive and multiply negative logits of every id in prompt or output (Keskar et al. 2019, CTRL)."""
    ids, _ = _history(rows, np.zeros_like(rows), states)
    index = (to_device(positions[:, None], logits.device), ids)
    penalty = to_device(states.sampling.repetition_penalty[rows][:, None], logits.device)
    old = logits[index]
    # An id that occurs twice is written twice with the same value.
    logits[index] = torch.where(old > 0, old / penalty, old * penalty)


def _penalise_output(logits: Tensor, positions: IntArray, rows: IntArray, states: RequestStates) -> None:
    """Subtract frequency_penalty * count + presence_penalty from every id in the output (OpenAI's definition)."""
    ids, is_real = _history(rows, states.prompt_len[rows], states)
    ordered = ids.where(is_real, -1).sort(dim=1).values
    counts = torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
    index = (to_device(positions[:, None], logits.device), ids)
    frequency = to_device(states.sampling.frequency_penalty[rows][:, None], logits.device)
    presence = to_device(states.sampling.presence_penalty[rows][:, None], logits.device)
    logits[index] = logits[index] - frequency * counts - presence


def _mask(logits: Tensor, rule: TokenRules, output_len: int) -> None:
    """Set the ids of logits [V] that `rule` forbids to -inf, in place."""
    if rule.allowed_ids is not None:
        kept = logits[rule.allowed_ids]
        logits.fill_(-math.inf)
        logits[rule.allowed_ids] = kept
    if rule.banned_ids is not None:
        logits.index_fill_(0, rule.banned_ids, -math.inf)
    if rule.early_stop_ids is not None and output_len < rule.min_tokens:
        logits.index_fill_(0, rule.early_stop_ids, -math.inf)
