"""Steps with prompts, recorded as CUDA graphs: all from token ids to hidden states, over memory that stays where it is.

Kernel by kernel the host is slower than the device for all but long prompts of large models. A graph is for a number of
tokens, of which a step may have fewer; how many belong to whom it reads on the device. Its sequences are places, too:
first those of decodes, then those of prompts, each of which may be empty. Tokens that are nobody's are computed like
others, by kernels that know no neighbours, and stored nowhere. Logits and samples come as in all other steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata
from workers.graphs import Call, GraphSet, Rank, Record, driver_bytes
from workers.input_batch import StepRows
from workers.models.base import ForwardBatch
from workers.row_sampling import to_device

_MOST_TOKENS = 2048  # from so many on the device is the slower one
_MOST_PROMPTS = 64  # of a step


class TokenStep:
    """A step of up to `size` tokens, in a call that takes no arguments."""

    def __init__(self, rank: Rank, hidden: Tensor) -> None:
        """hidden [size, hidden size]: where the hidden states go."""
        self.size, self._hidden, self._rank = len(hidden), hidden, rank
        rows = rank.states.limits.max_num_seqs
        self.num_decodes = min(rows, self.size)
        self.num_prompts = min(rows, max(self.size // 2, 1), _MOST_PROMPTS)
        num_seqs = self.num_decodes + self.num_prompts
        # Of tokens: row (-1: nobody's), position; of sequences: row, length (0: empty), then where each one's begin.
        self._parts = [self.size, self.size, num_seqs, num_seqs, num_seqs + 1]
        self._places = to_device(self._packed(None), rank.states.device)  # [sum of parts] int64

    def place(self, step: StepRows) -> None:
        """The next call is for this step."""
        self._places.copy_(to_device(self._packed(step), self._places.device), non_blocking=True)

    def _packed(self, step: StepRows | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """What `forward` reads, in one piece; None: no tokens."""
        packed = np.zeros(sum(self._parts), np.int64)
        tokens, positions, rows, lengths, starts = np.split(packed, np.cumsum(self._parts[:-1]))
        tokens[:] = -1
        if step is None:
            return packed
        num_tokens, num_seqs = len(step.positions), len(step.rows)
        tokens[:num_tokens], positions[:num_tokens] = step.token_rows, step.positions
        counts = np.diff(step.query_start_loc)
        num_decodes = int((counts == 1).sum())
        places = np.arange(num_seqs)
        places[num_decodes:] += self.num_decodes - num_decodes
        rows[places], lengths[places] = step.rows, step.seq_lens
        starts[places + 1] = counts
        np.cumsum(starts, out=starts)
        return packed

    def forward(self) -> None:
        """Hidden states of the tokens, and their keys and values into the cache."""
        states, block_size = self._rank.states, self._rank.states.limits.block_size
        tokens, positions, rows, lengths, starts = torch.split(self._places, self._parts)
        is_nobody, token_rows = tokens < 0, tokens.clamp(min=0)
        # What stands where nothing was ever written is no id.
        input_ids = states.token_ids[token_rows, positions].long().masked_fill(is_nobody, 0)
        blocks = states.block_table[token_rows, positions // block_size].long()
        slots = (blocks * block_size + positions % block_size).masked_fill(is_nobody, -1)
        metadata = AttentionMetadata(
            query_start_loc=starts.int(),
            seq_lens=lengths.int(),
            block_table=states.block_table[rows],
            num_decodes=self.num_decodes,
            max_query_len=self.size,
            max_seq_len=states.limits.max_model_len,
            has_empty_decodes=True,
        )
        batch = ForwardBatch(metadata, slots)
        self._hidden.copy_(self._rank.model.forward(input_ids, positions, batch, self._rank.cache.layers))

    def hidden(self, step: StepRows) -> Tensor:
        """[T, hidden size] of the last call; the next one overwrites them."""
        return self._hidden[: len(step.positions)]


class StepGraphs:
    """Those of a rank, by their size."""

    def __init__(self, rank: Rank, record: Record) -> None:
        self._rank, self._record = rank, record
        sizes = token_sizes(rank.states.limits.max_num_batched_tokens)
        self._graphs = GraphSet("tokens", sizes, self._make, rank.tp)
        self._hidden: Tensor | None = None  # [most tokens, hidden size], of all of them: one step runs at a time
        self.num_launched = 0

    def run(self, step: StepRows) -> Tensor | None:
        """Hidden states [T, hidden size]; None if no graph is there for such a step."""
        num_tokens = len(step.positions)
        if int((np.diff(step.query_start_loc) > 1).sum()) > _MOST_PROMPTS:
            return None
        found = self._graphs.find(num_tokens, most=2 * num_tokens + self._graphs.sizes[0])
        if found is None:
            return None
        token_step, forward = found
        token_step.place(step)
        forward()
        self.num_launched += 1
        return token_step.hidden(step)

    def record_next(self) -> bool:
        """See `GraphSet`."""
        return self._graphs.record_next()

    def _make(self, size: int) -> tuple[TokenStep, Call]:
        """Places of nobody change nothing: its first call is made with them."""
        spec = self._rank.model.spec
        if self._hidden is None:
            sizes = self._graphs.sizes[-1], spec.hidden_size
            self._hidden = torch.zeros(sizes, dtype=spec.dtype, device=self._rank.states.device)
        step = TokenStep(self._rank, self._hidden[:size])
        return step, self._record(step.forward)


@torch.inference_mode()
def step_once(rank: Rank) -> None:
    """What the largest graph does, for no tokens: to see what memory that takes."""
    spec, size = rank.model.spec, token_sizes(rank.states.limits.max_num_batched_tokens)[-1]
    TokenStep(rank, torch.zeros(size, spec.hidden_size, dtype=spec.dtype, device=rank.states.device)).forward()


def token_sizes(most_tokens: int) -> list[int]:
    """Four to every power of two from 128 on, and multiples of sixteen below; the last one is most_tokens if few."""
    most = min(most_tokens, _MOST_TOKENS)
    sizes = [*range(16, 128, 16), *(size for power in (128, 256, 512, 1024) for size in _between(power))]
    return [*(size for size in sizes if size < most), most]


def _between(power: int) -> range:
    return range(power, 2 * power, power // 4)


def step_graph_bytes(most_tokens: int, num_layers: int, hidden_bytes: int) -> int:
    """About what all graphs keep beside the memory that they share; hidden_bytes: of one token's hidden state."""
    sizes = token_sizes(most_tokens)
    return driver_bytes(len(sizes), num_layers) + sizes[-1] * hidden_bytes
