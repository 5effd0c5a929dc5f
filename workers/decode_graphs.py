"""Steps that only decode, recorded as CUDA graphs: the host says which rows, and launches one or two graphs.

A graph does all of such a step over memory that stays where it is: it reads the tokens of the rows from where the step
before it put them, computes, samples and appends. So no step waits for the host to know a token. A graph is for a
number of places; a step of fewer rows is padded. Sampling is a graph of its own: a step with rows that ask for more
than the kernel does (penalties, log-probabilities, ...) computes its logits by a graph and samples as other steps do.

Recording takes a moment, so a server starts without graphs: one is recorded when nothing runs, the largest first, whose
memory the others share, or once it would have been used often. With several ranks only the latter, since all ranks
have to do the same in the same step.
"""

from __future__ import annotations

import bisect
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, DecodeInputs, KernelBackend, PersistentRows, SamplingTensors
from novainfer.protocol.step import StepPlan
from workers.kv_cache import KVCache
from workers.models.base import CausalLM, ForwardBatch
from workers.request_states import RequestStates
from workers.row_sampling import IntArray, to_device
from workers.sampler import NO_ROWS, Sampled
from workers.tensor_parallel import TensorParallel

Call = Callable[[], None]
Record = Callable[[Call], Call]  # what it is given has been called once; what it returns does the same again

# Of one layer's kernels and copies in one graph. An estimate: about ten nodes with their arguments.
_DRIVER_BYTES = 64 << 10
_NO_MEMORY = re.compile(r"out of memory|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED")
_OFTEN = 32  # steps that a graph would have served: then it is recorded even while requests wait
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """What a step works with."""

    model: CausalLM
    kernels: KernelBackend
    tp: TensorParallel
    states: RequestStates
    cache: KVCache


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

    def __init__(self, rank: Rank, record: Record, max_rows: int) -> None:
        self._rank, self._record = rank, record
        self._sizes = graph_sizes(max_rows)
        self._graphs: dict[int, Graph] = {}
        self._missed: Counter[int] = Counter()
        self._logits: Tensor | None = None  # [max_rows, V] float32, of all of them: one step runs at a time
        self._is_full = False
        self.num_launched = 0

    def take(self, plan: StepPlan) -> Graph | None:
        """The graph for this plan, with its rows placed; None if the plan is no such step, or none is there yet."""
        rows = np.array(plan.rows, np.int64)
        if not self._fits(plan, rows):
            return None
        wanted = self._sizes[bisect.bisect_left(self._sizes, len(rows))]
        if wanted not in self._graphs:
            self._missed[wanted] += 1
            if self._missed[wanted] >= _OFTEN and not self._is_full:
                self._add(wanted)
        found = min((size for size in self._graphs if size >= len(rows)), default=None)
        if found is None:
            return None
        self.num_launched += 1
        graph = self._graphs[found]
        graph.step.place(rows)
        return graph

    def record_next(self) -> bool:
        """Record one that is missing; False if there is none, or if it has to wait for its turn."""
        missing = [size for size in self._sizes if size not in self._graphs]
        if not missing or self._is_full or self._rank.tp.world_size > 1:
            return False
        self._add(missing[-1])
        return True

    def _fits(self, plan: StepPlan, rows: IntArray) -> bool:
        if not 0 < len(rows) <= self._sizes[-1] or len(plan.num_new_tokens) != plan.num_new_tokens.count(1):
            return False
        states = self._rank.states
        all_sample = (states.num_computed_tokens[rows] + 1 == states.num_tokens[rows]).all()
        return bool(all_sample) and not plan.num_drafts

    def _add(self, size: int) -> None:
        """Places of no rows change nothing: their first calls are made with them.

        Without memory for it there will be no more graphs. With several ranks that raises: the others have recorded it.
        """
        states = self._rank.states
        try:
            if self._logits is None:
                self._logits = torch.zeros(self._sizes[-1], states.limits.vocab_size, device=states.device)
            step = DecodeStep(self._rank, self._logits[:size])
            graph = Graph(step, self._record(step.compute), self._record(step.sample))
        except RuntimeError as error:
            if self._rank.tp.world_size > 1 or not is_out_of_memory(error):
                raise
            self._is_full = True
            _log.warning("no memory for CUDA graphs beyond %s: %s", sorted(self._graphs) or "none", error)
            return
        self._graphs[size] = graph
        _log.info("steps of up to %d decodes are a CUDA graph now", size)


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
    return len(sizes) * num_layers * _DRIVER_BYTES + 4 * sum(sizes) * max_blocks


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that was the reason, or the reason of what came after it.

    torch's allocator raises `OutOfMemoryError`. Where the driver finds none, for a graph's nodes or a kernel's code, it
    is another `RuntimeError`, `AcceleratorError` in newer versions, and a capture that is left early adds its own.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def cuda_recorder(device: torch.device) -> Record:
    """Records CUDA graphs, which share their memory: no two of them run at the same time."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(call: Call) -> Call:
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            call()  # compiles, and allocates what libraries keep
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()
        except BaseException:
            torch.cuda.set_stream(before)  # a capture that fails at its end stays on its own
            raise
        return graph.replay

    return record


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
