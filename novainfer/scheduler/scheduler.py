"""Continuous batching as a pure step machine: messages and results in, plans and outputs out. No clock, no I/O.

There is no prefill or decode phase (vLLM's idea): every sequence has `num_computed_tokens` that catches up with
its tokens under one budget, which covers chunked prefill, prefix hits, preemption and resuming. A step is
submitted before the tokens of the step before it are known; see `Sequence`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque

from novainfer.config import CacheConfig, SchedulerConfig
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError
from novainfer.executor.base import ExecutorInfo
from novainfer.kv.manager import KVCacheManager
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    AddRequest,
    Logprobs,
    PromptLogprobs,
    TokenOutput,
)
from novainfer.protocol.step import NewBlocks, StepPlan, StepResult
from novainfer.scheduler.admission import check_request
from novainfer.scheduler.batch import ScheduledRow, StepBatch, StepOutputs, StepRecord, new_row
from novainfer.scheduler.isolation import Isolation
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import NO_ROW, Request, Sequence, make_request
from novainfer.scheduler.totals import Totals

# Answer of a full queue: about the time in which a few requests end. A later rate estimate may refine it.
_RETRY_AFTER_S = 1.0
# Token ids that a plan's new rows carry before no more rows are added: a few MiB, far below the largest message.
_MAX_NEW_IDS_PER_PLAN = 500_000
_NOT_FINITE = "The model's output was not finite."
_QUARANTINED = "This request made the engine fail again and again; it was given up (quarantined)."


class Scheduler:
    """Queue, block tables and rows of one replica. One thread calls it."""

    def __init__(self, info: ExecutorInfo, config: SchedulerConfig, cache: CacheConfig) -> None:
        self._config = config
        self._cache_config = cache
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of `Sequence.age`, oldest first
        self.requests: dict[str, Request] = {}
        self.totals = Totals()
        self._num_live = 0  # sequences that have not ended: running, waiting, or held back as followers
        self._in_flight: deque[StepRecord] = deque()
        self._isolation = Isolation()
        self._reset(info)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._arrivals = 0
        self._step = 0

    def _reset(self, info: ExecutorInfo) -> None:
        """Rows and blocks of workers that hold nothing yet."""
        self._info = info
        self._has_workers = True
        self.kv = KVCacheManager(
            info.num_blocks, info.block_size, enable_prefix_caching=self._cache_config.enable_prefix_caching
        )
        self._num_rows = min(info.max_num_seqs, self._config.max_num_seqs)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self._freed_rows: list[int] = []  # since the last plan

    @property
    def step(self) -> int:
        """Number of the newest plan."""
        return self._step

    @property
    def num_in_flight(self) -> int:
        """Plans whose results are not back yet."""
        return len(self._in_flight)

    # -- messages -------------------------------------------------------------------------------------------

    def add(self, message: AddRequest, now: float) -> list[TokenOutput]:
        """Accept a request; `now` in seconds on the caller's clock, for the deadline.

        Returns the ends of resumed choices that had nothing left to do. Raises `InvalidRequestError` or
        `OverloadedError`; then nothing has changed.
        """
        check_request(message, self._info)
        if message.request_id in self.requests:
            return []  # sent again by a gateway that was not sure: the first copy runs
        n = message.params.n
        if n > self._config.max_waiting + self._num_rows:
            raise InvalidRequestError(f"n = {n} is more than this server can ever queue.", param="n")
        is_new = not message.emitted  # one that goes on was accepted before, and its client has seen that
        if is_new and self._num_live - len(self.running) + n > self._config.max_waiting + len(self._free_rows):
            raise OverloadedError("The queue is full. Please retry later.", retry_after=_RETRY_AFTER_S)
        request = make_request(message, self._arrivals, now)
        self._arrivals += 1
        self.requests[request.request_id] = request
        self._num_live += n
        self.totals.accepted += 1
        self.totals.prompt_tokens += request.prompt_len
        if request.deadline != float("inf"):
            heapq.heappush(self._deadlines, (request.deadline, request.arrival, request))
        outputs = [output for sequence in request.sequences if (output := self._already_ended(sequence))]
        leader = request.sequences[0]
        request.followers = [s for s in request.sequences[1:] if not s.finished]
        if leader.finished:
            self._release_followers(request)
        else:
            self.waiting.push(leader)
        self._forget_if_finished(request)
        return outputs

    def cancel(self, request_id: str, choice: int = -1, *, complete: bool = False) -> list[TokenOutput]:
        """End a request, or one choice; unknown ones are fine. Returns the ends. `complete`: it met a stop string."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        chosen = [s for s in request.sequences if choice in (-1, s.choice) and not s.finished]
        self.totals.stopped_by_string += len(chosen) if complete else 0
        return [self._end(sequence, FINISH_CANCELLED) for sequence in chosen]

    def expire(self, now: float) -> list[TokenOutput]:
        """End every request whose deadline has passed."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            for sequence in request.sequences:
                if not sequence.finished:
                    outputs.append(self._end(sequence, FINISH_ERROR, error="The request's deadline has passed."))
        return outputs

    # -- workers go and come -----------------------------------------------------------------------------------

    def lose_workers(self, *, faulted: bool) -> list[TokenOutput]:
        """The workers are gone with all that they held: every sequence waits again, with its known tokens.

        `faulted`: they died of what they did, not from outside. Returns the end of the request that is to blame for
        it, if that is known. Until `attach_workers` nothing is scheduled; requests are accepted all the same.
        """
        culprit = self._isolation.after_death(
            (entry.sequence for record in self._in_flight for entry in record.rows), faulted=faulted
        )
        self._reset(self._info)
        self._has_workers = False
        self._in_flight.clear()
        for sequence in self.running:
            self.waiting.push(sequence)
        self.running.clear()
        for request in self.requests.values():
            request.prompt_computed = False
            for sequence in request.sequences:
                sequence.lose_workers()
        return [] if culprit is None else [self._end(culprit, FINISH_ERROR, error=_QUARANTINED)]

    def attach_workers(self, info: ExecutorInfo) -> list[TokenOutput]:
        """Workers that hold nothing are ready. Returns the ends of requests that are too large for them."""
        self._reset(info)
        outputs = []
        for request in list(self.requests.values()):
            try:
                check_request(request.message, info)
            except InvalidRequestError as error:
                live = [s for s in request.sequences if not s.finished]
                outputs += [self._end(sequence, FINISH_ERROR, error=error.message) for sequence in live]
        return outputs

    # -- a step ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Put the next step together; None if no sequence can go on before a result or a message arrives."""
        if not self._has_workers:
            return None
        batch = StepBatch(self._config.max_num_batched_tokens)
        suspect = self._isolation.next_suspect()
        if suspect is not None and self._in_flight:
            return None
        alone = suspect is not None and self._schedule_alone(suspect, batch)
        self._isolation.runs_alone(suspect if alone else None)
        if not alone:
            self._schedule_decodes(batch)
            self._schedule_chunks(batch)
            self._admit(batch)
        rows = batch.rows
        if not rows:
            return None
        self._step += 1
        plan = batch.plan(self._info.epoch, self._step, self._freed_rows, self.kv.index.take_changes())
        self._freed_rows = []
        self._in_flight.append(StepRecord(self._step, rows))
        for entry in rows:
            request = entry.sequence.request
            if entry.sequence.choice == 0 and entry.num_computed_after >= request.prompt_len:
                request.prompt_computed = True
                self._release_followers(request)
        return plan

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the oldest step's result. Raises `EngineError` if it is not that step's."""
        record = self._in_flight.popleft()
        sampled = [entry for entry in record.rows if entry.samples]
        if result.step != record.step or result.rows != [entry.row for entry in sampled]:
            raise EngineError(f"the result of step {result.step} does not answer the plan of step {record.step}")
        bad_rows = set(result.bad_rows)
        for entry in record.rows:
            if entry.generation == entry.sequence.generation:
                entry.sequence.num_confirmed_tokens = entry.num_computed_after
                if entry.row in bad_rows:  # no other request may find what it computed
                    self.kv.forget(entry.sequence.table)
        # Before any request ends: a prompt's log-probabilities may come with its last token.
        prompt_logprobs = self._prompt_logprobs(record, result)
        outputs = []
        for i, entry in enumerate(sampled):
            logprobs = result.logprobs[i] if result.logprobs else None
            output = self._take_token(entry, result.token_ids[i], logprobs, entry.row in bad_rows)
            if output is not None:
                outputs.append(output)
        for entry in record.rows:
            sequence = entry.sequence
            if entry.row in bad_rows and not entry.samples and not sequence.finished:
                outputs.append(self._end(sequence, FINISH_ERROR, error=_NOT_FINITE))
            if sequence.is_running:
                self.kv.index_blocks(sequence.table, sequence.token_ids, sequence.num_confirmed_tokens)
        return StepOutputs(outputs, prompt_logprobs)

    # -- putting a step together ----------------------------------------------------------------------------

    def _schedule_alone(self, suspect: Sequence, batch: StepBatch) -> bool:
        """A step for this sequence and no other; False if it has to wait for rows or blocks like any other."""
        if suspect.is_running:
            batch.add(suspect, min(suspect.num_tokens - suspect.num_computed_tokens, batch.budget))
            return True
        if suspect in self.waiting and self._free_rows and self._start(suspect, batch):
            self.waiting.remove(suspect)
            return True
        return False

    def _schedule_decodes(self, batch: StepBatch) -> None:
        """Rows with one token to compute go first: a long prompt must not make them wait."""
        for sequence in list(self.running):
            left = sequence.num_tokens - sequence.num_computed_tokens
            if left == 1 and sequence.wants_step and self._make_room(sequence, batch):
                batch.add(sequence, 1)

    def _schedule_chunks(self, batch: StepBatch) -> None:
        """Prompts on their way, oldest first. Their blocks were taken when they were admitted."""
        for sequence in self.running:
            left = sequence.num_tokens - sequence.num_computed_tokens
            if left > 1 and batch.budget > 0:
                batch.add(sequence, min(left, batch.budget))

    def _admit(self, batch: StepBatch) -> None:
        """Waiting sequences in order, while there are rows, budget, blocks and room in the plan's message."""
        while batch.budget > 0 and self._free_rows and batch.num_new_ids < _MAX_NEW_IDS_PER_PLAN:
            sequence = self.waiting.peek()
            # A preempted sequence may still have tokens in flight: its row is made from known tokens only.
            if sequence is None or sequence.num_pending or sequence in self._isolation:
                return
            if not self._start(sequence, batch):
                return
            self.waiting.pop()

    def _make_room(self, sequence: Sequence, batch: StepBatch) -> bool:
        """A slot for the next token; preempts the youngest. False if that was the sequence itself."""
        if not sequence.is_running:  # preempted a moment ago, for an older one
            return False
        first = sequence.num_computed_tokens
        if len(sequence.table.blocks) * self._info.block_size > first:
            return True
        while (growth := self.kv.grow(sequence.table, first, first + 1)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        batch.new_blocks.append(NewBlocks(sequence.row, growth.new_blocks))
        return True

    def _start(self, sequence: Sequence, batch: StepBatch) -> bool:
        """Give the sequence a row, its prefix and blocks for all its tokens; False if they do not suffice."""
        computed = self._share_prefix(sequence)
        table, num_tokens = sequence.table, len(sequence.token_ids)
        # Each running sequence will soon want a block: without this reserve, admission causes preemption.
        reserve = len(self.running)
        if self.kv.blocks_to_grow(table, computed, num_tokens) + reserve > self.kv.pool.num_free:
            self.kv.release(table)
            return False
        growth = self.kv.grow(table, computed, num_tokens)
        if growth is None:
            raise EngineError("the KV pool lost blocks between counting and taking them")
        batch.copies.extend(growth.copies)
        sequence.row = self._free_rows.pop()
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = computed
        if sequence.choice == 0 and sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(computed, sequence.request.prompt_len)
            self.totals.cached_prompt_tokens += sequence.num_cached_tokens
        insort(self.running, sequence, key=lambda s: s.age)
        batch.add_new_row(new_row(sequence))
        batch.add(sequence, min(num_tokens - computed, batch.budget))
        return True

    def _share_prefix(self, sequence: Sequence) -> int:
        """Tokens whose KV is there already: of choice 0, whose prompt is the same, or in the prefix cache."""
        request = sequence.request
        leader = request.sequences[0]
        if request.prompt_computed and leader.is_running and leader is not sequence and sequence.num_output == 0:
            self.kv.fork(leader.table, sequence.table, request.prompt_len - 1)
            return request.prompt_len - 1
        return self.kv.attach_prefix(sequence.table, sequence.token_ids)

    def _preempt(self, victim: Sequence) -> None:
        """Take everything the sequence holds; its tokens are computed again later (the same bits)."""
        self._release(victim)
        victim.generation += 1
        victim.num_preemptions += 1
        victim.num_computed_tokens = victim.num_confirmed_tokens = 0
        if victim.choice == 0:
            victim.request.prompt_computed = False
        self.totals.preemptions += 1
        self.waiting.push(victim)

    # -- applying a result ----------------------------------------------------------------------------------

    def _take_token(
        self, entry: ScheduledRow, token_id: int, logprobs: Logprobs | None, bad: bool
    ) -> TokenOutput | None:
        """Append a sampled token; None if the choice has ended meanwhile."""
        sequence = entry.sequence
        if sequence.finished:
            return None
        sequence.num_pending -= 1
        if bad:
            return self._end(sequence, FINISH_ERROR, error=_NOT_FINITE)
        self._isolation.clear(sequence)
        index = sequence.num_output
        sequence.token_ids.append(token_id)
        self.totals.generation_tokens += 1
        reason = sequence.finish_reason()
        if reason is not None:
            self._finish(sequence, reason)
        return sequence.output(index, [token_id], reason, logprobs=[logprobs] if logprobs is not None else [])

    def _prompt_logprobs(self, record: StepRecord, result: StepResult) -> list[PromptLogprobs]:
        by_row = {entry.row: entry.sequence for entry in record.rows}
        return [
            PromptLogprobs(by_row[item.row].request.request_id, item.start, item.entries)
            for item in result.prompt_logprobs
            if not by_row[item.row].request.finished
        ]

    # -- ends -----------------------------------------------------------------------------------------------

    def _already_ended(self, sequence: Sequence) -> TokenOutput | None:
        """A resumed choice whose last token was emitted but whose end was lost."""
        reason = sequence.finish_reason()
        return self._end(sequence, reason) if reason else None

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> TokenOutput:
        """Finish a sequence between tokens; the output that says so carries no token."""
        index = sequence.num_output
        self._finish(sequence, reason)
        return sequence.output(index, [], reason, error=error)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finished = True
        self._isolation.clear(sequence)
        self._num_live -= 1
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        if sequence.is_running:
            self.kv.index_blocks(sequence.table, sequence.token_ids, sequence.num_confirmed_tokens)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        request = sequence.request
        if sequence in request.followers:
            request.followers.remove(sequence)
        if sequence.choice == 0:
            self._release_followers(request)
        self._forget_if_finished(request)

    def _release(self, sequence: Sequence) -> None:
        """Blocks and row go back. Steps in flight may still write there: later steps run after them."""
        self.kv.release(sequence.table)
        self.running.remove(sequence)
        self._freed_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW

    def _release_followers(self, request: Request) -> None:
        """The other choices may start: choice 0 has computed the prompt, or will never do so."""
        for sequence in request.followers:
            self.waiting.push(sequence)
        request.followers = []

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self.requests.pop(request.request_id, None)
