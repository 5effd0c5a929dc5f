"""One step on one rank: plan in, result out (rank 0).

`launch` starts a step without waiting for the device, `PendingStep.finish` waits for its results. On a GPU the next
step may be launched before the last one has finished: it reads the sampled tokens from the rows on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.backend import KernelBackend
from novainfer.protocol.columns import column
from novainfer.protocol.messages import Logprobs
from novainfer.protocol.step import RowPromptLogprobs, StepPlan, StepResult
from workers.decode_graphs import DecodeGraphs, Graph
from workers.drafts import NOT_FINITE, true_places
from workers.embedding import Embedded, Places, split_off
from workers.grammars import Grammars
from workers.graphs import Rank, Record
from workers.input_batch import InputBatch, PromptSpan, StepRows
from workers.kv_cache import KVCache
from workers.logprobs import LogprobTensors, concatenate, gather_logprobs, rows_per_slice
from workers.models.base import CausalLM
from workers.request_states import RequestStates
from workers.row_sampling import IntArray, to_device
from workers.sampler import Sampled, Sampler
from workers.step_graphs import StepGraphs
from workers.tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Log-probabilities of one row's prompt tokens."""

    span: PromptSpan
    logprobs: LogprobTensors
    is_bad: Tensor  # [] bool: some logits were not finite


class Graphs(NamedTuple):
    """Those of steps that only decode, and those of others."""

    decodes: DecodeGraphs
    steps: StepGraphs


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. Its tensors are on the host, and valid once `done` has happened."""

    plan: StepPlan
    sampled: Sampled | None  # None: no row sampled
    prompts: list[PromptResult]
    done: torch.cuda.Event | None  # None: the host computed everything itself
    num_drafted: list[int] = field(default_factory=list)  # see `StepResult`
    embedded: Embedded | None = None

    def finish(self) -> StepResult:
        """Wait for the device and make the result."""
        if self.done is not None:
            self.done.synchronize()
        sampled = self.sampled
        bad = {prompt.span.row for prompt in self.prompts if bool(prompt.is_bad)}
        refused: dict[int, str] = {}
        if sampled is not None:
            refused = {row: why for row, why in sampled.refused().items() if row not in bad}
            bad.update(sampled.rows[sampled.is_bad.numpy()].tolist())
        result = StepResult(
            epoch=self.plan.epoch,
            step=self.plan.step,
            rows=column() if sampled is None else column(sampled.rows.tolist()),
            token_ids=column() if sampled is None else column(sampled.token_ids.tolist()),
            logprobs=[] if sampled is None else _token_logprobs(sampled, bad),
            prompt_logprobs=[_prompt_record(prompt) for prompt in self.prompts if prompt.span.row not in bad],
            bad_rows=sorted(bad),
            num_drafted=self.num_drafted,
            refused=refused,
        )
        if self.embedded is not None:
            self.embedded.add_to(result, self.plan)
        return result


class ModelRunner:
    """Owns the rows and the KV cache of a rank, and runs plans in the order they come."""

    def __init__(
        self,
        model: CausalLM,
        kernels: KernelBackend,
        tp: TensorParallel,
        states: RequestStates,
        cache: KVCache,
        record: Record | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """record: makes graphs of steps; None: they run kernel by kernel. grammars: None: rows have none."""
        self.states = states
        self.cache = cache
        self._model = model
        self._tp = tp
        self._kernels = kernels
        self._sampler = Sampler(kernels, grammars)
        self._copies = HostCopies(states.device)
        self._graphs: Graphs | None = None
        if record is not None:
            rank = Rank(model, kernels, tp, states, cache)
            self._graphs = Graphs(DecodeGraphs(rank, record), StepGraphs(rank, record))

    @property
    def progress(self) -> int:
        """Grows with every layer, or graph; may be read by another thread."""
        return self._model.progress + sum(graphs.num_launched for graphs in self._graphs or ())

    def drop_rows(self) -> None:
        """Forget all rows: their owner is gone."""
        self.states.clear()

    @torch.inference_mode()
    def use_idle_time(self) -> bool:
        """See `Runner`: record a graph. Rows may be in use: of those that have ended the next plan tells."""
        return any(graphs.record_next() for graphs in self._graphs or ())

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run a step to its end: the result on rank 0, None elsewhere. Raises `EngineError` for an impossible plan."""
        pending = self.launch(plan)
        return None if pending is None else pending.finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep | None:
        """Start one step, and bring the rows to the state after it. None on ranks other than 0."""
        with self.cache.step(plan):
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> PendingStep | None:
        self.states.apply(plan)
        if plan.new_rows and self._tp.rank == 0:
            self._sampler.expect(plan.new_rows, self.states)
        self.cache.copy_blocks(plan.copy_src, plan.copy_dst)
        sampled: Sampled | None = None
        embedded: Embedded | None = None
        prompts: list[PromptResult] = []
        num_drafts = self._find_drafts(plan) if plan.num_drafts else None
        embedding = self.states.embedding  # a graph of decodes knows nothing of such rows
        is_plain = not embedding or embedding.isdisjoint(plan.rows)
        if self._graphs is not None and is_plain and (graph := self._graphs.decodes.take(plan)) is not None:
            sampled = self._launch_graph(graph, np.array(plan.rows, np.int64))
        elif plan.rows:
            step = StepRows.of(self.states, plan, num_drafts)
            hidden, sample_hidden = self._forward(step)
            prompts = [prompt for span in step.prompt_spans if (prompt := self._prompt_logprobs(hidden, span))]
            self.states.advance(step.rows, step.num_new_tokens)
            places = Places(
                hidden if sample_hidden is None else hidden[sample_hidden], step.sample_rows, step.sample_ahead
            )
            if not is_plain:
                embedded, places = split_off(places, embedding)
            sampled = self._sample(places)
        if self._tp.rank != 0:
            return None
        drafted = [] if num_drafts is None else num_drafts[: len(plan.num_drafts)].tolist()
        return self._pending(PendingStep(plan, sampled, prompts, None, drafted, embedded))

    def _forward(self, step: StepRows) -> tuple[Tensor, Tensor | None]:
        """Hidden states [K, hidden], and which of them the sampled tokens follow: [S] int64, or None for all."""
        if self._graphs is not None and (hidden := self._graphs.steps.run(step)) is not None:
            return hidden, to_device(step.sample_hidden, hidden.device)
        batch = InputBatch.build(self.states, step)
        hidden = self._model.forward(batch.input_ids, batch.positions, batch.forward, self.cache.layers)
        return hidden, batch.sample_hidden

    def _launch_graph(self, graph: Graph, rows: IntArray) -> Sampled | None:
        """A step of decodes whose rows the graph has been told."""
        graph.compute()
        self.states.advance(rows, np.ones_like(rows))
        chosen = self.states.sampling.select(rows)
        if not chosen.is_plain or len(chosen.logprob_positions):
            return self._sample_logits(graph.step.logits(len(rows)), rows)
        graph.sample()
        self.states.count_appended(rows)
        return graph.step.sampled(rows) if self._tp.rank == 0 else None

    def _find_drafts(self, plan: StepPlan) -> IntArray | None:
        """How many drafts each row of the plan has; they stand behind its tokens. None: nowhere any."""
        most = np.array(plan.num_drafts, np.int64)
        rows = np.array(plan.rows[: len(most)], np.int64)
        found = np.zeros(len(plan.rows), np.int64)
        found[: len(most)] = self._kernels.find_drafts(
            self.states.token_ids.numpy(), rows, self.states.num_tokens[rows], most
        )
        return found if found.any() else None

    def _sample(self, places: Places) -> Sampled | None:
        """Sample on rank 0 and append the tokens to the rows of all ranks."""
        chosen, rows, ahead = places
        if not len(rows):
            return None
        picked = self._sampler.pick(partial(self._model.pick, chosen), rows, self.states, ahead)
        if picked is not None:
            return self._append(picked, picked.token_ids, rows, ahead)
        return self._sample_logits(self._model.logits(chosen), rows, ahead)

    def _sample_logits(self, logits: Tensor, rows: IntArray, ahead: IntArray | None = None) -> Sampled | None:
        """Logits [S, V] float32 of places of `rows` [S], changed in place; ahead: see `StepRows.sample_ahead`."""
        sampled: Sampled | None = None
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if self._tp.rank == 0:
            sampled = self._sampler.sample(logits, rows, self.states, ahead)
            token_ids = sampled.token_ids
        return self._append(sampled, token_ids, rows, ahead)

    def _append(
        self, sampled: Sampled | None, token_ids: Tensor, rows: IntArray, ahead: IntArray | None
    ) -> Sampled | None:
        """Append what rank 0 has sampled, token_ids [S] there, to the rows of all ranks."""
        if ahead is not None:
            return self._sample_with_drafts(sampled, token_ids, rows, ahead)
        token_ids = self._tp.broadcast(token_ids)
        self.states.append(rows, token_ids)
        return sampled

    def _sample_with_drafts(
        self, sampled: Sampled | None, token_ids: Tensor, rows: IntArray, ahead: IntArray
    ) -> Sampled | None:
        """Append the tokens up to the first that its draft, or a sound row, would not have had."""
        if sampled is not None:
            token_ids = token_ids.masked_fill(sampled.is_bad, NOT_FINITE)
        tokens = self._tp.broadcast(token_ids).numpy()
        kept = true_places(tokens, rows, ahead, self.states)
        followers = rows[kept & (ahead > 0)]
        self.states.append(rows[kept], torch.from_numpy(np.maximum(tokens[kept], 0)), ahead[kept])
        np.add.at(self.states.num_computed_tokens, followers, 1)
        return None if sampled is None else sampled.only(kept)

    def _prompt_logprobs(self, hidden: Tensor, span: PromptSpan) -> PromptResult | None:
        """Log-probabilities of a chunk's prompt tokens on rank 0; the other ranks take part in the logits alone."""
        targets = self.states.token_ids[span.row, span.start : span.start + span.count].long()
        step = rows_per_slice(self.states.limits.vocab_size)
        parts: list[LogprobTensors] = []
        maxima: list[Tensor] = []
        for i in range(0, span.count, step):
            count = min(step, span.count - i)
            first = span.first_hidden + i
            logits = self._model.logits(hidden[first : first + count])
            if self._tp.rank == 0:
                parts.append(gather_logprobs(logits, targets[i : i + count], span.num_top))
                maxima.append(logits.amax())
        if not parts:
            return None
        return PromptResult(span, concatenate(parts), ~torch.isfinite(torch.stack(maxima)).all())

    def _pending(self, step: PendingStep) -> PendingStep:
        """Start the copies to the host."""
        if self.states.device.type == "cpu":
            return step
        sampled, prompts, embedded = step.sampled, step.prompts, step.embedded
        with self._copies.begin() as to_host:
            if sampled is not None:
                sampled = replace(
                    sampled,
                    token_ids=to_host(sampled.token_ids),
                    is_bad=to_host(sampled.is_bad),
                    is_ruled_out=None if sampled.is_ruled_out is None else to_host(sampled.is_ruled_out),
                    logprobs=None if sampled.logprobs is None else sampled.logprobs.map(to_host),
                )
            prompts = [PromptResult(p.span, p.logprobs.map(to_host), to_host(p.is_bad)) for p in prompts]
            if embedded is not None:
                embedded = replace(embedded, vectors=to_host(embedded.vectors))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return PendingStep(step.plan, sampled, prompts, done, step.num_drafted, embedded)


class HostCopies:
    """Copies to the host beside the next step, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def begin(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Of tensors that the step so far has computed: pinned memory, complete when the stream has come this far."""
        stream = self._stream
        assert stream is not None

        def to_host(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor.to("cpu", non_blocking=True)

        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield to_host


def _token_logprobs(sampled: Sampled, bad: set[int]) -> list[Logprobs | None]:
    """One entry a sampled row, None for rows that did not ask; empty if none asked."""
    if sampled.logprobs is None:
        return []
    records: list[Logprobs | None] = [None] * len(sampled.rows)
    for position, record in zip(
        sampled.logprob_positions, sampled.logprobs.records(sampled.num_top.tolist()), strict=True
    ):
        if int(sampled.rows[position]) not in bad:
            records[position] = record
    return records


def _prompt_record(prompt: PromptResult) -> RowPromptLogprobs:
    span = prompt.span
    return RowPromptLogprobs(span.row, span.start, prompt.logprobs.records([span.num_top] * span.count))
