"""Steps that only decode, recorded as CUDA graphs: the host says which rows, and launches one or two graphs.

A graph does all of such a step over memory that stays where it is: it reads the tokens of the rows from where the step
before it put them, computes, samples and appends. So no step waits for the host to know a token. A graph is for a
number of places; a step of fewer rows is padded. Sampling is a graph of its own: a step with rows that ask for more
than the kernel does (penalties, log-probabilities, ...) computes its logits by a graph and samples as other steps do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, DecodeInputs, PersistentRows, SamplingTensors
from novainfer.protocol.step import StepPlan
from workers.graphs import Call, GraphSet, Rank, Record, driver_bytes
from workers.models.base import ForwardBatch
from workers.request_states import RequestStates
from workers.row_sampling import IntArray, to_device
from workers.sampler import NO_ROWS, Sampled


class DecodeStep:
    """One step for up to `size` rows, in two calls that take no arguments."""

    def __init__(self, rank: Rank, logits: Tensor) -> None:
        """logits [size, V] float32: where they go."""
        self.size = size = len(logits)
        self._rank, self._logits = rank, logits
        states, device = rank.states, rank.states.device
        self._rows = PersistentRows(
            states.token_ids, states.block_table, states.sampling.floats, states.sampling.integers
        )
        self._places = torch.full((3, size), -1, dtype=torch.int64, device=device)  # see `prepare_decodes`
        self._inputs = _inputs(size, states.block_table.shape[1], device)
        self._query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._is_bad = torch.zeros(size, dtype=torch.bool, device=device)

    def place(self, rows: IntArray) -> None:
        """The next calls are for these rows."""
        states = self._rank.states
        places = np.full((3, self.size), -1, np.int64)
        places[:, : len(rows)] = rows, states.num_tokens[rows] - 1, states.output_len(rows)
        self._places.copy_(to_device(places, states.device), non_blocking=True)

    def compute(self) -> None:
        """Logits of the rows, and their keys and values into the cache."""
        model, kernels, states = self._rank.model, self._rank.kernels, self._rank.states
        inputs = self._inputs
        kernels.prepare_decodes(self._places, self._rows, states.limits.block_size, inputs)
        metadata = AttentionMetadata(  # of this call alone: what kernels derive from it belongs to one step
            query_start_loc=self._query_start_loc,
            seq_lens=inputs.seq_lens,
            block_table=inputs.block_table,
            num_decodes=self.size,
            max_query_len=1,
            max_seq_len=states.limits.max_model_len,
        )
        batch = ForwardBatch(metadata, inputs.slot_mapping)
        hidden = model.forward(inputs.input_ids, inputs.positions, batch, self._rank.cache.layers)
        self._logits.copy_(model.logits(hidden))

    def sample(self) -> None:
        """A token of each row, which becomes its last one."""
        kernels, tp = self._rank.kernels, self._rank.tp
        if tp.rank == 0:
            self._token_ids, self._is_bad = kernels.choose(self._logits, self._inputs.sampling)
        self._token_ids = tp.broadcast(self._token_ids)
        kernels.append_tokens(self._places, self._token_ids, self._rank.states.token_ids)

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, V] float32 of the last `compute`; the next one overwrites them."""
        return self._logits[:num_rows]

    def sampled(self, rows: IntArray) -> Sampled:
        """What the last `sample` found: copies, since the next one overwrites them."""
        num_rows = len(rows)
        token_ids, is_bad = self._token_ids[:num_rows].clone(), self._is_bad[:num_rows].clone()
        return Sampled(rows, token_ids, is_bad, NO_ROWS, NO_ROWS, None)


@dataclass(frozen=True, slots=True)
class Graph:
    """A step that was recorded."""

    step: DecodeStep
    compute: Call
    sample: Call


class DecodeGraphs:
    """Those of a rank, by their size."""

    def __init__(self, rank: Rank, record: Record) -> None:
        self._rank, self._record = rank, record
        self._max_rows = rank.states.limits.max_num_seqs
        self._graphs = GraphSet("decodes", graph_sizes(self._max_rows), self._make, rank.tp)
        self._logits: Tensor | None = None  # [max_rows, V] float32, of all of them: one step runs at a time
        self.num_launched = 0

    def take(self, plan: StepPlan) -> Graph | None:
        """The graph for this plan, with its rows placed; None if the plan is no such step, or none is there yet."""
        rows = np.array(plan.rows, np.int64)
        graph = self._graphs.find(len(rows)) if _only_decodes(plan, rows, self._rank.states) else None
        if graph is not None:
            self.num_launched += 1
            graph.step.place(rows)
        return graph

    def record_next(self) -> bool:
        """See `GraphSet`."""
        return self._graphs.record_next()

    def _make(self, size: int) -> Graph:
        """Places of no rows change nothing: its first calls are made with them."""
        states = self._rank.states
        if self._logits is None:
            self._logits = torch.zeros(self._max_rows, states.limits.vocab_size, device=states.device)
        step = DecodeStep(self._rank, self._logits[:size])
        return Graph(step, self._record(step.compute), self._record(step.sample))


def _only_decodes(plan: StepPlan, rows: IntArray, states: RequestStates) -> bool:
    """Whether each of its rows samples after one token."""
    if not len(rows) or plan.num_drafts or len(plan.num_new_tokens) != plan.num_new_tokens.count(1):
        return False
    return bool((states.num_computed_tokens[rows] + 1 == states.num_tokens[rows]).all())


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, then multiples of eight, and of sixteen from 64 on, up to max_rows, which is one of them."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 16)]
    return [*(size for size in sizes if size < max_rows), max_rows]


@torch.inference_mode()
def decode_once(rank: Rank) -> None:
    """What the largest graph does, for no rows: to see what memory that takes, or to compile it."""
    limits = rank.states.limits
    step = DecodeStep(rank, torch.zeros(limits.max_num_seqs, limits.vocab_size, device=rank.states.device))
    step.compute()
    step.sample()


def kept_bytes(max_rows: int, num_layers: int, max_blocks: int) -> int:
    """About what all graphs keep beside the memory that they share: what the driver has of each, and block tables.

    max_blocks: of a row.
    """
    sizes = graph_sizes(max_rows)
    return driver_bytes(len(sizes), num_layers) + 4 * sum(sizes) * max_blocks


def _inputs(size: int, max_blocks: int, device: torch.device) -> DecodeInputs:
    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return DecodeInputs(
        input_ids=zeros(torch.int64),
        positions=zeros(torch.int64),
        seq_lens=zeros(torch.int32),
        slot_mapping=zeros(torch.int64),
        block_table=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
        sampling=SamplingTensors(
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32),
            min_p=zeros(torch.float32),
            seed=zeros(torch.int64),
            choice=zeros(torch.int32),
            index=zeros(torch.int64),
        ),
    )
