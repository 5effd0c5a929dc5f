"""Sequences that get one token in every step, as columns: a step of theirs alone looks at none of them. Pure; in the
scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from typing import TypeVar

from novainfer.protocol.columns import column
from novainfer.protocol.step import StepResult
from novainfer.scheduler.batch import Steady, StepBatch, StepRecord
from novainfer.scheduler.indexing import IndexPace
from novainfer.scheduler.newest import NewestTokens
from novainfer.scheduler.request import Sequence, by_age

T = TypeVar("T")

_MOST_STOP_IDS = 64  # of a member: whoever comes or goes has its own counted


class Cohort:
    """Running sequences that are members, and the `others`.

    A member computes one token in every plan from step `Sequence.joined` on, and every such plan's result has one token
    of it. So what it has now follows from the numbers of the newest plan and of the newest result. Its own counters
    know nothing of these plans until `leave` brings them up to date (results of older ones still come in one by one);
    `settle` does so with those of the results alone (token ids, confirmed tokens), and happens by itself whenever its
    blocks are to be indexed (`IndexPace`). Who is to be looked at, or is to have anything but one plain token, must
    leave before: whoever ends, loses its row, or sampled a stop token. The plans in flight that it was a member of then
    count it among those that are looked at one by one.
    """

    def __init__(self, num_rows: int, pace: IndexPace, in_flight: deque[StepRecord]) -> None:
        """in_flight: the scheduler's, oldest first; only entries of members that leave are written."""
        self.others: list[Sequence] = []  # that run, in order of age
        self._members: list[Sequence] = []  # in order of age; the next three are columns of theirs
        self._rows, self._refs, self._first_indexes = column(), column(), column()
        self._block_size = pace.block_size
        self._pace = pace
        self._in_flight = in_flight
        self._planned = 0  # step of the newest plan
        self._taken = 0  # step of the newest result
        self._steady: Steady | None = None  # the members' columns, if nobody came or went since they were made
        # By the number of computed tokens before step n, less n, modulo the block size; in order of age.
        self._phases: list[list[Sequence]] = [[] for _ in range(pace.block_size)]
        # Likewise, by what `IndexPace.place` makes of that number.
        self._index_phases: list[list[Sequence]] = [[] for _ in range(pace.num_tokens)]
        self._sum_computed = 0  # of all members: computed tokens before step n, less n
        self._last_steps: defaultdict[int, list[Sequence]] = defaultdict(list)  # by the step of their last token
        self._stop_ids: Counter[int] = Counter()
        self._tenants: Counter[str] = Counter()
        self._newest = NewestTokens(pace.num_tokens, num_rows)  # that a member may not have in its own `token_ids`

    @staticmethod
    def admits(sequence: Sequence) -> bool:
        """Whether it may join when it wants one token: nothing of it is special, and its client gets plain tokens."""
        return (
            sequence.num_ahead == 0
            and sequence.ref >= 0
            and sequence.params.logprobs is None
            and len(sequence.stop_token_ids) <= _MOST_STOP_IDS
            and sequence.num_computed_tokens >= max(sequence.prompt_len, sequence.num_charged_tokens)
        )

    # -- who belongs to it ------------------------------------------------------------------------------------

    def got_row(self, sequence: Sequence) -> None:
        """It is one of the others for now."""
        insort(self.others, sequence, key=by_age)

    def loses_row(self, sequence: Sequence) -> None:
        """It is neither a member nor one of the others any more."""
        self.leave(sequence)
        del self.others[bisect_left(self.others, sequence.age, key=by_age)]

    def join(self, sequence: Sequence, step: int) -> None:
        """One of the `others`, which `admits`, has one token in the plan of `step`, the next one, and from then on."""
        del self.others[bisect_left(self.others, sequence.age, key=by_age)]
        sequence.joined, sequence.settled = step, step - 1
        sequence.first_index = sequence.num_tokens - sequence.prompt_len - step
        self._planned = step - 1
        self._steady = None
        place = bisect_left(self._members, sequence.age, key=by_age)
        self._members.insert(place, sequence)
        self._rows.insert(place, sequence.row)
        self._refs.insert(place, sequence.ref)
        self._first_indexes.insert(place, sequence.first_index)
        for phase in self._phases_of(sequence):
            insort(phase, sequence, key=by_age)
        self._sum_computed += sequence.num_computed_tokens - step
        self._last_steps[self._last_step(sequence)].append(sequence)
        self._stop_ids.update(sequence.stop_token_ids)
        self._tenants[sequence.tenant] += 1

    def leave(self, sequence: Sequence, applying: StepRecord | None = None) -> None:
        """It is one of the `others` again, with all that it has; nothing happens to one that is no member.

        applying: the record that is being applied, which is in flight no more, and whose tokens were not taken yet.
        """
        first = sequence.joined
        if not first:
            return
        place = bisect_left(self._members, sequence.age, key=by_age)
        for values in (self._members, self._rows, self._refs, self._first_indexes):
            del values[place]
        for phase in self._phases_of(sequence):
            phase.remove(sequence)
        self._sum_computed -= sequence.num_computed_tokens - first
        last = self._last_step(sequence)
        self._last_steps[last].remove(sequence)
        if not self._last_steps[last]:
            del self._last_steps[last]
        for token_id in sequence.stop_token_ids:
            _count_down(self._stop_ids, token_id)
        _count_down(self._tenants, sequence.tenant)
        insort(self.others, sequence, key=by_age)
        self._bring_up_to_date([sequence], applying)

    def dissolve(self, applying: StepRecord | None = None) -> None:
        """All leave."""
        members, self._members = self._members, []
        self._rows, self._refs, self._first_indexes = column(), column(), column()
        if members:
            for phase in (*self._phases, *self._index_phases):
                phase.clear()
            for counts in (self._last_steps, self._stop_ids, self._tenants):
                counts.clear()
            self._sum_computed = 0
            self.others = sorted(self.others + members, key=by_age)
            self._bring_up_to_date(members, applying)

    def _bring_up_to_date(self, sequences: list[Sequence], applying: StepRecord | None) -> None:
        """These are members no more, and get the counters that go with it."""
        self._steady = None
        for record in self._in_flight if applying is None else (applying, *self._in_flight):
            record.single_out([s for s in sequences if s.joined <= record.step])
        for sequence in sequences:
            self.settle(sequence)
            planned = self._planned - sequence.joined + 1
            if planned:
                sequence.num_computed_tokens += planned
                sequence.num_charged_tokens = sequence.num_computed_tokens
                sequence.num_pending += planned
                sequence.work += 2 * planned
                sequence.last_step = self._planned
            sequence.joined = 0

    def _phases_of(self, sequence: Sequence) -> tuple[list[Sequence], list[Sequence]]:
        """Those that it belongs to, for its growth and for the index."""
        shift = sequence.num_computed_tokens - sequence.joined
        place = self._pace.place(sequence.row, shift)
        return self._phases[shift % self._block_size], self._index_phases[place]

    @staticmethod
    def _last_step(sequence: Sequence) -> int:
        """The step that samples its last token, if no stop token comes before."""
        return sequence.joined + sequence.end_len - sequence.num_computed_tokens - 2

    # -- a plan -----------------------------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        """Whether anybody who runs may have tokens in the next plan: not while all that is left of them is in flight.
        Whoever may have drafts is to be asked.
        """
        return bool(self._members) or self._others_may_go_on()

    def _others_may_go_on(self) -> bool:
        for s in self.others:
            left = len(s.token_ids) + s.num_pending - s.num_computed_tokens
            if left > 1 or s.drafts is not None or (left == 1 and s.num_computed_tokens + 1 < s.end_len - s.num_ahead):
                return True
        return False

    @property
    def is_alone(self) -> bool:
        """Whether members, and nobody else who runs, may have tokens in the next plan."""
        return bool(self._members) and not self._others_may_go_on()

    def starting_blocks(self, step: int) -> list[Sequence]:
        """The members whose token of this step, the next one, is the first of a block that they lack; by age."""
        size = self._block_size
        phase = self._phases[-step % size]
        return [s for s in phase if s.num_computed_tokens - s.joined + step >= len(s.table.blocks) * size]

    def num_computed(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that the plans so far compute."""
        return sequence.num_computed_tokens + (self._planned - sequence.joined + 1 if sequence.joined else 0)

    def advance(self, batch: StepBatch, others: list[Sequence], step: int) -> Counter[str]:
        """The decodes of the plan of `step`: all members, for whom there is room, and these others, which are advanced.

        Returns how many of each tenant the members are.
        """
        self._planned = step
        if not self._members:
            batch.add_decodes(others)
        elif not others:
            batch.add_steady(self._columns())
        else:
            batch.add_decodes(sorted(self._members + others, key=by_age))
        batch.steady_context = self._sum_computed + len(self._members) * (step + 1)
        return self._tenants

    def _columns(self) -> Steady:
        """All members; the same object as long as nobody comes or goes."""
        if self._steady is None:
            counts = column([1]) * len(self._members)
            self._steady = Steady(self._members.copy(), self._rows[:], self._refs[:], self._first_indexes[:], counts)
        return self._steady

    def let_end(self, step: int) -> None:
        """The plan of `step` is in flight: members with their last token in it leave."""
        for sequence in tuple(self._last_steps.get(step, ())):
            self.leave(sequence)

    # -- its result -------------------------------------------------------------------------------------------

    def let_out(self, record: StepRecord, result: StepResult) -> None:
        """Before a result is taken: members for whom it has anything but a token that ends nothing leave."""
        if not self._members or record.drafts:  # nobody in a step with drafts is a member
            return
        odd, tokens = record.not_finite(result), result.token_ids
        if self._stop_ids and not self._stop_ids.keys().isdisjoint(tokens):
            odd += [s for s, token_id in zip(record.sampled, tokens, strict=True) if token_id in s.stop_token_ids]
        if result.logprobs:
            odd += [s for s, entry in zip(record.sampled, result.logprobs, strict=True) if entry is not None]
        for sequence in odd:
            if 0 < sequence.joined <= record.step:
                self.leave(sequence, record)

    def take(self, record: StepRecord, result: StepResult) -> list[Sequence]:
        """Take the members' tokens. Returns those whose blocks are to be indexed now, in order of age; settled."""
        self._taken = step = record.step
        if not self._members:
            return []
        if not record.drafts:  # nobody in a step with drafts is a member
            self._newest.put(step, record.sampled_rows, result.token_ids)
        due = [s for s in self._index_phases[-(step + 1) % self._pace.num_tokens] if s.joined <= step]
        for sequence in due:
            self.settle(sequence)
        return due

    def settle(self, sequence: Sequence) -> None:
        """Add what it got by results to its own counters; nothing happens to one that is no member."""
        count = self._taken - sequence.settled if sequence.joined else 0
        if count > 0:
            sequence.token_ids += self._newest.of_row(sequence.row, sequence.settled + 1)
            sequence.num_confirmed_tokens += count
            sequence.num_pending -= count
            sequence.settled = self._taken


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
