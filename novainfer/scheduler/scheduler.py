"""Continuous batching as a pure step machine: messages and results in, plans and outputs out. No clock, no I/O.

There is no prefill or decode phase (vLLM's idea): every sequence has `num_computed_tokens` that catches up with
its tokens under one budget, which covers chunked prefill, prefix hits, preemption and resuming. A step is
submitted before the tokens of the step before it are known; see `Sequence`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping

from novainfer.config import CacheConfig, SchedulerConfig
from novainfer.errors import InvalidRequestError, OverloadedError
from novainfer.executor.base import ExecutorInfo
from novainfer.kv.manager import KVCacheManager
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    RequestRejected,
    TokenOutput,
)
from novainfer.protocol.step import StepPlan, StepResult
from novainfer.scheduler.admission import check_request
from novainfer.scheduler.assembly import StepAssembly, members_alone
from novainfer.scheduler.batch import NOT_FINITE, PlainTokens, StepBatch, StepOutputs, StepRecord
from novainfer.scheduler.deadlines import Deadlines
from novainfer.scheduler.drafted import take_drafts
from novainfer.scheduler.drafting import Drafting
from novainfer.scheduler.fairness import FairShares
from novainfer.scheduler.isolation import QUARANTINED, Isolation
from novainfer.scheduler.load import LoadMeter
from novainfer.scheduler.placement import Placement
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Request, Sequence, as_it_is_now, make_request
from novainfer.scheduler.rows import Rows
from novainfer.scheduler.timing import Timing
from novainfer.scheduler.totals import Totals

_RETRY_AFTER_S = 1.0  # before anything was measured


class Scheduler:
    """Queue, block tables and rows of one replica. One thread calls it."""

    def __init__(
        self,
        info: ExecutorInfo,
        config: SchedulerConfig,
        cache: CacheConfig,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`weights` of tenants among each other; those that are not named have 1."""
        self._config = config
        self._cache_config = cache
        self._shares = FairShares(weights or {})
        self.waiting = WaitingQueue(self._shares)
        self.requests: dict[str, Request] = {}
        self.totals = Totals()
        self.timing = Timing()
        self._load = LoadMeter()
        self._drafting = Drafting()
        self.now: float | None = None  # of this turn, where the caller says
        self._num_live = 0  # sequences that have not ended: running, waiting, or held back as followers
        self._in_flight: deque[StepRecord] = deque()
        self._isolation = Isolation()
        self._reset(info)
        self._deadlines = Deadlines()
        self._not_begun: OrderedDict[str, Request] = OrderedDict()  # in order of acceptance
        self._arrivals = 0
        self._step = 0

    def _reset(self, info: ExecutorInfo) -> None:
        """Rows and blocks of workers that hold nothing yet."""
        self._info = info
        self._has_workers = True
        self._budget = self._config.max_num_batched_tokens or info.max_num_batched_tokens
        self._drafting.is_on = self._config.speculation != "none" and info.can_draft
        self._rows = Rows(info, self._config, self._cache_config, self._shares, self._in_flight)
        self._placement = Placement(self._rows, self.waiting, self._shares, self.totals)

    @property
    def kv(self) -> KVCacheManager:
        """Blocks and prefix index of the workers."""
        return self._rows.kv

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row, oldest first; not to be changed."""
        return self._rows.running

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
        """Accept a request; `now` in seconds on the caller's clock, for its time limits.

        Returns the ends of choices that have nothing left to do. Raises `InvalidRequestError` or
        `OverloadedError`; then nothing has changed.
        """
        check_request(message, self._info)
        if message.request_id in self.requests:
            return []  # sent again by a gateway that was not sure: the first copy runs
        n = message.params.n
        room = self._config.max_waiting + self._rows.num_rows
        if n > room:
            raise InvalidRequestError(f"n = {n} is more than this server can ever queue.", param="n")
        is_new = not message.emitted  # one that goes on was accepted before, and its client has seen that
        if is_new and self._num_live + n > room:
            raise OverloadedError("The queue is full. Please retry later.", retry_after=self.queue_seconds)
        self._shares.enter(message.tenant, n)
        request = make_request(message, self._arrivals, now, may_draft=self._drafting.is_on)
        self._arrivals += 1
        self.requests[request.request_id] = request
        self._num_live += n
        self.totals.accepted += 1
        self.totals.choices_accepted += n
        self.totals.prompt_tokens += request.prompt_len
        self._deadlines.watch(request, self.requests)
        if not any(message.emitted):
            self._not_begun[request.request_id] = request
        outputs = [output for sequence in request.sequences if (output := self._already_ended(sequence))]
        leader = request.sequences[0]
        request.followers = [s for s in request.sequences[1:] if not s.finished]
        self.waiting.hold_back(request.followers)
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

    def settle(self, request: Request) -> None:
        """From now until the next result its choices hold all the tokens that they have got."""
        for sequence in request.sequences:
            self._rows.cohort.settle(sequence)

    def expire(self, now: float) -> list[TokenOutput]:
        """Let the time become `now`, once a turn: end every request whose deadline has passed."""
        self.now = now
        self._load.tick(now, busy=bool(self._in_flight))
        self.waiting.waits.tick(now)
        outputs = []
        for request in self._deadlines.passed(now, self.requests):
            stage = "it waited in the queue" if request.request_id in self._not_begun else "its tokens were generated"
            error = f"The request's time limit passed while {stage}."
            live = [sequence for sequence in request.sequences if not sequence.finished]
            outputs += [self._end(sequence, FINISH_ERROR, error=error) for sequence in live]
        return outputs

    def give_up_waiting(self, now: float) -> list[RequestRejected]:
        """Refuse what has had no step for `queue_timeout` seconds; it is forgotten here."""
        limit = self._config.queue_timeout
        refused = []
        while limit > 0 and self._not_begun:
            request_id, request = next(iter(self._not_begun.items()))
            if now - request.accepted_at < limit:
                break
            del self._not_begun[request_id]
            for sequence in request.sequences:
                if not sequence.finished:
                    self._finish(sequence, FINISH_ERROR)
            message = f"The request waited in the queue for {limit:g} s and had no step. Please retry later."
            refused.append(RequestRejected(request_id, 503, message, code="overloaded", retry_after=self.queue_seconds))
        return refused

    @property
    def queue_seconds(self) -> float:
        """Estimate: in how many seconds what waits now will have started."""
        seconds = self._load.seconds_for(self.waiting.work)
        return _RETRY_AFTER_S if seconds is None else seconds

    # -- workers go and come -----------------------------------------------------------------------------------

    def lose_workers(self, *, faulted: bool) -> list[TokenOutput]:
        """The workers are gone with all that they held: every sequence waits again, with its known tokens.

        `faulted`: they died of what they did, not from outside. Returns the end of the request that is to blame for
        it, if that is known. Until `attach_workers` nothing is scheduled; requests are accepted all the same.
        """
        in_flight = [as_it_is_now(s, self.requests) for record in self._in_flight for s in record.sequences]
        culprit = self._isolation.after_death(in_flight, faulted=faulted)
        self.waiting.lose_workers(self._rows.drop_all())
        self._reset(self._info)
        self._has_workers = False
        self._in_flight.clear()
        for request in self.requests.values():
            request.prompt_computed = False
            for sequence in request.sequences:
                sequence.lose_workers()
        return [] if culprit is None else [self._end(culprit, FINISH_ERROR, error=QUARANTINED)]

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
        if not self._has_workers or (self._in_flight and self._keeps_the_way_free()):
            return None
        suspect = self._isolation.next_suspect(self.waiting)
        if suspect is not None and self._in_flight:
            return None
        self._shares.forget_absent(self._step)
        batch = None
        if suspect is None and not self.waiting:
            self._isolation.runs_alone(None)
            if not self._rows.cohort.may_go_on():
                return None  # as in most turns, which must not take long to find out
            if not self._isolation:
                batch = members_alone(self._placement, self._shares, self._drafting, self._budget, step=self._step + 1)
        if batch is None and (batch := self._assemble(suspect)).is_empty:
            return None
        self._step += 1
        record = batch.record(self._step, self.now)
        self._in_flight.append(record)
        self._rows.cohort.let_end(self._step)
        self.timing.begin(batch.prompts, self.now)
        for sequence in batch.prompts:
            sequence.last_step = self._step
            self._not_begun.pop(sequence.request_id, None)
            request, computed = sequence.request, sequence.num_computed_tokens
            if not request.prompt_computed and sequence.choice == 0 and computed >= sequence.prompt_len:
                request.prompt_computed = True
                self._release_followers(request)
        return batch.plan(self._info.epoch, record, self._rows.take_freed(), self.kv.index.take_changes())

    def _assemble(self, suspect: Sequence | None) -> StepBatch:
        parts = self._placement, self.waiting, self._shares, self._isolation, self._drafting
        assembly = StepAssembly(*parts, self._budget, step=self._step + 1)
        alone = suspect is not None and assembly.schedule_alone(suspect)
        self._isolation.runs_alone(suspect if alone else None)
        if not alone:
            assembly.schedule_all()
        return assembly.batch

    def _keeps_the_way_free(self) -> bool:
        """While one tenant's many rows make steps long, none queues behind the one that runs: another tenant's next
        request would have to wait for both.
        """
        if self._shares.num_present < 2:
            return False
        newest = self._in_flight[-1]
        return self._drafting.pace.is_long(newest.num_tokens, newest.context) and bool(self._rows.excess())

    def update(self, result: StepResult) -> StepOutputs:
        """Apply the oldest step's result. Raises `EngineError` if it is not that step's."""
        record = self._in_flight.popleft()
        sampled = record.sampled_by(result)
        if self._isolation:
            self._rows.cohort.dissolve(record)
        self._rows.cohort.let_out(record, result)
        self._load.done(record.num_tokens + 2 * len(sampled) - len(record.sampled))
        if self.now is not None and record.submitted is not None:
            self.timing.first_tokens(record.begun, self.now)
            self._drafting.pace.measure(record, self.now, sum(result.num_drafted))
        bad = record.not_finite(result)
        full = record.confirm(self._rows.pace, self._rows.cohort.take(record, result))
        if record.drafts:
            full += take_drafts(record, result, self._shares, self.totals, self._info.block_size)
            self._drafting.reconsider()
        # Before any request ends: a prompt's log-probabilities may come with its last token.
        prompt_logprobs = record.prompt_logprobs(result)
        plain, others = self._take_tokens(sampled, record, result, bad)
        for sequence in bad:
            reason, words = end = record.why_bad(sequence, result)
            if end == NOT_FINITE:
                self.kv.forget(sequence.table)  # no other request may find what it computed
            if not sequence.finished:
                others.append(self._end(sequence, reason, error=words))
        self._rows.index(full)
        return StepOutputs(plain, others, prompt_logprobs, record.notes() if record.noted else [])

    def _take_tokens(
        self, sampled: list[Sequence], record: StepRecord, result: StepResult, bad: Collection[Sequence]
    ) -> tuple[PlainTokens, list[TokenOutput]]:
        """Append the sampled tokens of choices that have not ended meanwhile, and end those that do with theirs.

        The cohort has taken its own already.
        """
        plain, others = record.plain_tokens(sampled, result.token_ids), list[TokenOutput]()
        if not (record.sampled_others or record.drafts):
            self.totals.generation_tokens += len(sampled)
            return plain, others
        is_watching = bool(self._isolation)
        num_ignored, told = 0, set()
        places = range(len(sampled)) if record.drafts else sorted(record.sampled_others)
        for place in places:
            sequence, token_id = sampled[place], result.token_ids[place]
            if not sequence.finished:
                sequence.num_pending -= 1
            if sequence.finished or (bad and sequence in bad):
                num_ignored += 1
                continue
            if is_watching:
                self._isolation.clear(sequence)
            if sequence.embeds:
                num_ignored += 1
                self._finish(sequence, FINISH_STOP)
                others.append(sequence.embedded(result.embedding_of(result.rows[place])))
                continue
            index, reason = sequence.num_output, sequence.take(token_id)
            entry = result.logprobs[place] if result.logprobs else None
            if reason is None and entry is None and sequence.ref >= 0:
                plain.write(place, index)
                told.add(place)
                continue
            if reason is not None:
                self._finish(sequence, reason)
            others.append(sequence.output(index, [token_id], reason, logprobs=None if entry is None else [entry]))
        self.totals.generation_tokens += len(sampled) - num_ignored
        return plain.without(set(places) - told), others

    # -- ends -----------------------------------------------------------------------------------------------

    def _already_ended(self, sequence: Sequence) -> TokenOutput | None:
        """A resumed choice whose last token was emitted, or which was given up, but whose end was lost."""
        if not self._isolation.come(sequence):
            return self._end(sequence, FINISH_ERROR, error=QUARANTINED)
        reason = sequence.finish_reason()
        return self._end(sequence, reason) if reason else None

    def _end(self, sequence: Sequence, reason: str, error: str | None = None) -> TokenOutput:
        """Finish a sequence between tokens; the output that says so carries no token."""
        self._rows.cohort.leave(sequence)
        index = sequence.num_output
        self._finish(sequence, reason)
        return sequence.output(index, [], reason, error=error)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self._rows.cohort.leave(sequence)
        if reason in (FINISH_STOP, FINISH_LENGTH) and sequence.work:
            bound = (sequence.request.prompt_len if sequence.choice == 0 else 0) + 2 * sequence.request.max_tokens
            self._load.ended(sequence.work, bound)
            self.timing.end(sequence, self.now)
        sequence.finished = True
        self._isolation.leave(sequence)
        self._num_live -= 1
        self._shares.leave(sequence.tenant, self._step)
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        if sequence.is_running:
            self._rows.release(sequence)
        else:
            self.waiting.remove(sequence)
        request = sequence.request
        if sequence in request.followers:
            request.followers.remove(sequence)
        if sequence.choice == 0:
            self._release_followers(request)
        self._forget_if_finished(request)

    def _release_followers(self, request: Request) -> None:
        """The other choices may start: choice 0 has computed the prompt, or will never do so."""
        for sequence in request.followers:
            self.waiting.push(sequence)
        request.followers = []

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self.requests.pop(request.request_id, None)
            self._not_begun.pop(request.request_id, None)
            request.part_from_choices()
