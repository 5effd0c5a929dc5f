"""Log-probabilities under the model's own distribution: log_softmax of the raw logits in float32.

Penalties, bias, temperature and truncation do not enter (the meaning OpenAI's API gives to `logprobs`). Order is by
logit, equal ones by the lower id, so ranks and alternatives are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from novainfer.protocol.messages import Logprobs

# Elements of logits worked on at once.
_MAX_SLICE = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities at R positions, with the K most probable alternatives of each."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32
    ranks: Tensor  # [R] int64, 1 = most probable
    top_ids: Tensor  # [R, K] int64
    top_logprobs: Tensor  # [R, K] float32

    def map(self, change: Callable[[Tensor], Tensor]) -> LogprobTensors:
        """The same with every tensor changed (moved, sliced by rows)."""
        return LogprobTensors(
            change(self.token_ids),
            change(self.logprobs),
            change(self.ranks),
            change(self.top_ids),
            change(self.top_logprobs),
        )

    def records(self, num_top: Sequence[int]) -> list[Logprobs]:
        """One wire record a position, with num_top[i] <= K alternatives. Waits for the device."""
        columns = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_top,
            strict=True,
        )
        return [
            Logprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
            for token_id, logprob, rank, top_ids, top_logprobs, count in columns
        ]


def rows_per_slice(vocab_size: int) -> int:
    """How many rows of logits may be worked on at once."""
    return max(1, _MAX_SLICE // vocab_size)


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Log-probabilities of token_ids [R] int64 and of the num_top best ids under logits [R, V] float32.

    Row r depends on logits[r] and token_ids[r] alone. Memory beyond the result is bounded by slicing the rows.
    """
    step = rows_per_slice(logits.shape[1])
    parts = [
        _gather_slice(logits[i : i + step], token_ids[i : i + step], min(num_top, logits.shape[1]))
        for i in range(0, logits.shape[0], step)
    ]
    if len(parts) == 1:
        return parts[0]
    return concatenate(parts)


def concatenate(parts: Sequence[LogprobTensors]) -> LogprobTensors:
    """Positions of all parts, one after the other; the parts have the same K."""
    return LogprobTensors(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def _gather_slice(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    logprobs = _log_softmax(logits)
    chosen = token_ids[:, None]
    # On a CPU finding them by keys takes far longer; on a GPU looking for ties would wait for the device.
    top_ids = top_ids_by_key(logits, num_top) if logits.is_cuda else top_ids_of(logits, num_top)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=logprobs.gather(1, chosen)[:, 0],
        ranks=_ranks(logits, chosen),
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )


def _log_softmax(logits: Tensor) -> Tensor:
    """Each row by itself, in an order that depends on V alone: on a GPU only where rows begin at 16 bytes."""
    vocab_size = logits.shape[1]
    padding = -vocab_size % 4 if logits.is_cuda else 0
    if padding:
        logits = F.pad(logits, (0, padding), value=-math.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab_size]


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 + how many ids come before chosen [R, 1]: those of larger logit, and of equal logit but lower id. [R] int64."""
    chosen_logits = logits.gather(1, chosen)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # Counted in float32, which is exact up to 2^24 ids and several times faster on a CPU than summing booleans.
    larger = torch.gt(logits, chosen_logits, out=torch.empty_like(logits)).sum(dim=1)
    equal = torch.eq(logits, chosen_logits, out=torch.empty_like(logits)).masked_fill_(ids >= chosen, 0.0).sum(dim=1)
    return (1 + larger + equal).long()


def top_ids_by_key(logits: Tensor, num_top: int) -> Tensor:
    """What `top_ids_of` finds, in one search over integers no two of which are equal; NaNs may come anywhere."""
    if num_top == 0:
        return _no_ids(logits)
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # in this sum both zeros are one
    in_order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they now have the order of the numbers
    keys = in_order.long() * vocab_size + torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    return vocab_size - 1 - keys.topk(min(num_top, vocab_size), dim=1).values.remainder_(vocab_size)


def top_ids_of(logits: Tensor, num_top: int) -> Tensor:
    """The num_top ids of largest logit, ties to the lower id: [R, num_top] int64."""
    if num_top == 0:
        return _no_ids(logits)
    values, found = logits.topk(min(num_top + 1, logits.shape[1]), dim=1)
    # `topk` leaves the order of equal values open: a stable sort by id, then by value, settles it ...
    ids = found[:, :num_top].sort(dim=1).values
    ids = ids.gather(1, logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices)
    # ... and also which of them are in, where the last one in equals the first one out.
    if values.shape[1] > num_top:
        for row in (values[:, num_top - 1] == values[:, num_top]).nonzero()[:, 0].tolist():
            ids[row] = logits[row].sort(descending=True, stable=True).indices[:num_top]
    return ids


def _no_ids(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
