"""Puts one step together: decodes, prompt chunks and new sequences under one token budget. Pure; in the scheduler."""

from __future__ import annotations

from collections.abc import Set

from novainfer.protocol.messages import WAITED_BLOCKS, WAITED_GRAMMAR, WAITED_ROWS, WAITED_SHARE, WAITED_TOKENS
from novainfer.scheduler.batch import StepBatch
from novainfer.scheduler.drafting import MOST_DRAFTS, Drafting
from novainfer.scheduler.fairness import FairShares
from novainfer.scheduler.isolation import Isolation
from novainfer.scheduler.placement import Placement
from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Sequence, by_age

# Other tenants' sequences that start before one that lacks blocks; then they wait with it.
MAX_PASSED = 4
# Token ids that a plan's new rows carry before no more rows are added: a few MiB, far below the largest message.
_MAX_NEW_IDS_PER_PLAN = 500_000
# Different grammars that they bring: rank 0 builds each, in some 50 ms at most, and all rows of the step wait for that.
MAX_NEW_GRAMMARS = 2
# While several tenants are present, prompts get this part of a step's tokens, so that steps are short, and those of one
# tenant its share of it; but never less than the other part, where steps would be short for nothing.
_CROWDED_PART = 1 / 4
_SMALLEST_PART = 1 / 16
# A long step in which a prompt ends gets no more prompts once this part of it is full.
_ENDING_PART = 1 / 4
# Beside decodes prompts get no more tokens than make a step so long, for so long other streams stand still, or so many
# times as long as one of the decodes alone; but at least the other part of a full step.
_PAUSE_SECONDS = 0.2
_PAUSE_STEPS = 3
_LEAST_BESIDE = 1 / 8
# Kernels take tokens in blocks of so many, or twice that, and a part of a block in the time of a whole one: decodes and
# prompts together come to whole ones.
_BLOCK_TOKENS = 4


def members_alone(
    placement: Placement, shares: FairShares, drafting: Drafting, max_num_batched_tokens: int, *, step: int
) -> StepBatch | None:
    """The step of the cohort's members alone, put together while nobody waits or is suspected; None, and nothing
    changed, if there are none, or it may have to be another one.

    `StepAssembly` would come to the same. But nearly all steps are such, each comes after a sleep, and what takes long
    then is to fetch code and objects from memory.
    """
    rows = placement.rows
    cohort = rows.cohort
    if not cohort.is_alone or shares.num_present > 1 or not drafting.is_quiet(step, rows):
        return None
    batch = StepBatch(max_num_batched_tokens)
    growing = cohort.starting_blocks(step)
    if growing and not placement.grow_together(growing, batch):
        return None
    for name, count in cohort.advance(batch, [], step).items():
        shares.charge(name, 2 * count)
    return batch


class StepAssembly:
    """One step while its rows are chosen; `batch` is what comes of it."""

    def __init__(
        self,
        placement: Placement,
        waiting: WaitingQueue,
        shares: FairShares,
        isolation: Isolation,
        drafting: Drafting,
        max_num_batched_tokens: int,
        *,
        step: int,
    ) -> None:
        """`step`: the number that its plan will have."""
        self.batch = StepBatch(max_num_batched_tokens)
        self._placement = placement
        self._rows = placement.rows
        self._waiting = waiting
        self._shares = shares
        self._isolation = isolation
        self._pace = drafting.pace
        self._drafting = drafting
        self._max_tokens = max_num_batched_tokens
        self._step = step
        self._may_have_chunks = True  # False: every row on its way has but one token to compute
        self._chunk_tokens: dict[str, int] = {}  # by tenant, in this step
        self._most_beside: int | None = None  # see `_most_beside_decodes`; None: nobody has asked since the decodes
        self._excess: dict[str, float] = {}  # tenants far above their share, while there are others
        self._yielding: set[str] = set()  # those of them that make way, in this step
        self._drafts: dict[int, int] = {}  # see `Drafting.choose`
        self._new_grammars: set[str] = set()  # that rows bring which start with this step

    def schedule_alone(self, suspect: Sequence) -> bool:
        """A step for this sequence and no other; False if it has to wait for rows or blocks like any other."""
        self._rows.cohort.dissolve()
        self._waiting.waits.stop("", {})
        if suspect.is_running:
            self._add(suspect, min(suspect.num_tokens - suspect.num_computed_tokens, self.batch.budget))
            return True
        if suspect in self._waiting and self._rows.num_free and self._placement.start(suspect, self.batch):
            self._waiting.take(suspect)
            self._add(suspect, min(len(suspect.token_ids) - suspect.num_computed_tokens, self.batch.budget))
            return True
        return False

    def schedule_all(self) -> None:
        """Everybody who can go on, and new ones as long as there is room."""
        self._placement.restore_shares()
        self._excess = self._rows.excess() if self._shares.num_present > 1 else {}
        owed = self._owed() if self._excess else set()
        self._schedule_some()
        if self._yielding and not owed & self._chunk_tokens.keys():  # for nobody: what was to start could not
            self._yielding = set()
            self._schedule_some()

    def _schedule_some(self) -> None:
        """Rows with one token to compute go first: a long prompt must not make them wait."""
        self._schedule_decodes()
        self._most_beside = None
        self._schedule_chunks()
        self._admit()

    def _schedule_decodes(self) -> None:
        # A row that is in the step can neither be in it twice nor be preempted for another one.
        taken = set(map(id, (*self.batch.decodes, *self.batch.chunks)))
        order = self._placement.decode_order()
        if taken:
            order = [s for s in order if id(s) not in taken]
        cohort = self._rows.cohort
        room = min(self.batch.budget - self._rows.num_rows, MOST_DRAFTS - sum(self.batch.drafts.values()))
        self._drafts = self._drafting.choose(self._step, self._rows, room)
        is_plain = not (self._excess or self._isolation or self._drafts)
        if not is_plain:
            cohort.dissolve()
        candidates = cohort.others if is_plain else order
        wanted = [
            s
            for s in candidates
            # One token, and not its last, however many drafts in flight come true.
            if s.num_computed_tokens + 1 == len(s.token_ids) + s.num_pending < s.end_len - s.num_ahead
        ]
        self._may_have_chunks = len(wanted) < len(candidates)
        if is_plain:
            wanted = self._through_cohort(wanted)
        self._add_decodes(self._affordable(self._paced(wanted)), order)

    def _through_cohort(self, wanted: list[Sequence]) -> list[Sequence]:
        """Who of these may join the cohort does. Returns the others, by age, and members that still lack a block: none
        if members alone need some and there are enough, as nearly always.
        """
        cohort = self._rows.cohort
        for sequence in wanted:
            if cohort.admits(sequence):
                cohort.join(sequence, self._step)
        others = [sequence for sequence in wanted if not sequence.joined]
        growing = cohort.starting_blocks(self._step)
        size = self._rows.info.block_size
        are_alone = not any(s.num_ahead or s.num_computed_tokens % size == 0 for s in others)
        if are_alone and self._placement.grow_together(growing, self.batch):
            return others
        return sorted(others + growing, key=by_age) if others else growing

    def _add_decodes(self, chosen: list[Sequence], order: list[Sequence]) -> None:
        """One more token for each, and for all members of the cohort; of the chosen ones that are members, a block.

        `StepBatch.add` written out: there may be hundreds.
        """
        batch, block_size, step = self.batch, self._rows.info.block_size, self._step
        cohort = self._rows.cohort
        added: list[Sequence] = []
        paid: list[Sequence] = []
        add = added.append
        drafts = self._drafts
        for sequence in chosen:
            if sequence.row < 0:
                continue  # it was preempted a moment ago, for another one
            if sequence.joined:
                self._placement.grow(sequence, batch, order)
                continue
            computed = sequence.num_computed_tokens
            if (computed % block_size == 0 or sequence.num_ahead) and not self._placement.grow(sequence, batch, order):
                continue
            wanted = drafts.get(id(sequence), 0) if drafts else 0
            if wanted and (most := self._placement.room_for_drafts(sequence, wanted, batch)) > 0:
                batch.allow_drafts(sequence, most, len(batch.decodes) + len(added))
            add(sequence)
            sequence.num_computed_tokens = computed + 1
            sequence.num_pending += 1
            sequence.last_step = step
            if computed < sequence.num_charged_tokens:  # computed before, and lost since
                sequence.note_computed(computed, computed + 1)
                paid.append(sequence)
                sequence.work += 1
            else:
                sequence.num_charged_tokens = computed + 1
                sequence.work += 2
            if computed < sequence.prompt_len:
                batch.prompts.append(sequence)
        units = {name: 2 * count for name, count in cohort.advance(batch, added, step).items()}
        for sequence in added:
            units[sequence.tenant] = units.get(sequence.tenant, 0) + 2
        for sequence in paid:
            units[sequence.tenant] -= 1
        for name, count in units.items():
            self._shares.charge(name, count)

    def _owed(self) -> set[str]:
        """Tenants for whom others make way in this step: they have a prompt to compute, are not far above their share,
        and got no more service than one that is, and that therefore yields.
        """
        prompts = [s for s in self._rows.cohort.others if s.num_tokens - s.num_computed_tokens > 1]
        if self._rows.num_free:
            prompts += self._waiting.heads(self._excess)
        served = {s.tenant: self._shares.of(s.tenant).served for s in prompts if s.tenant not in self._excess}
        least = min(served.values(), default=float("inf"))
        self._yielding = {name for name in self._excess if self._shares.of(name).served >= least}
        most = max((self._shares.of(name).served for name in self._yielding), default=-1.0)
        return {name for name, units in served.items() if units <= most}

    def _paced(self, wanted: list[Sequence]) -> list[Sequence]:
        """The rows of this step: those of tenants far above their share take turns where all would make it long, and no
        more than their share of them runs of those who yield.
        """
        if not self._excess:
            return wanted
        base = [s for i, s in enumerate(wanted) if i == 0 or s.tenant not in self._excess]
        others = [s for i, s in enumerate(wanted) if i > 0 and s.tenant in self._excess]
        others.sort(key=lambda s: (s.last_step, s.age))
        base += [s for s in others if s.tenant in self._yielding][: self._rows_due(self._yielding)]
        others = [s for s in others if s.tenant not in self._yielding]
        due = self._rows_due(self._excess.keys() - self._yielding)
        if len(others) > due:
            certain = [s.num_tokens for s in (*base, *self.batch.decodes)]
            allowed = self._pace.rows_allowed(certain, [s.num_tokens for s in others])
            others = others[: max(due, allowed)]
        chosen = {id(s) for s in (*base, *others)}
        return [s for s in wanted if id(s) in chosen]

    def _affordable(self, wanted: list[Sequence]) -> list[Sequence]:
        """Those for whom there are tokens: all, unless the first pass has given some to prompts; else those who had
        their last one longest ago.
        """
        room = max(self.batch.budget, 0)
        if len(wanted) <= room:
            return wanted
        chosen = set(map(id, sorted(wanted, key=lambda s: (s.last_step, s.age))[:room]))
        return [s for s in wanted if id(s) in chosen]

    def _rows_due(self, names: Set[str]) -> int:
        return sum(self._shares.rows_due(self._shares.of(name), self._rows.num_rows) for name in names)

    def _schedule_chunks(self) -> None:
        """Prompts on their way, oldest first, the least served tenant's before. They have their blocks already."""
        if not self._may_have_chunks:
            return
        taken = set(map(id, (*self.batch.decodes, *self.batch.chunks)))  # one token of a prompt is like a decode
        found: dict[str, list[Sequence]] = {}
        for s in self._rows.cohort.others:
            if len(s.token_ids) + s.num_pending - s.num_computed_tokens > 1 and id(s) not in taken:
                found.setdefault(s.tenant, []).append(s)
        for name in sorted(found, key=lambda name: (self._shares.of(name).served, found[name][0].age)):
            for sequence in found[name]:
                room = self._chunk_room(name, self._room_for_all())
                if room <= 0:
                    break
                self._add_chunk(sequence, min(sequence.num_tokens - sequence.num_computed_tokens, room))

    def _admit(self) -> None:
        """Waiting sequences in order, while there are rows, budget, blocks and room in the plan's message."""
        passing: dict[str, str] = {}  # tenants whose first sequence cannot start now, and why
        why = self._admit_past(passing)
        if self._waiting.waits:
            self._waiting.waits.stop(why, passing)

    def _admit_past(self, passing: dict[str, str]) -> str:
        """`_admit`, which fills `passing`. Returns what all the others wait for; "" if for nothing."""
        lacking: list[Sequence] = []  # those of them that lack blocks
        while self._rows.num_free and self.batch.num_new_ids < _MAX_NEW_IDS_PER_PLAN:
            sequence = self._waiting.peek(passing)
            if sequence is None or sequence in self._isolation:
                return ""  # a suspect runs alone, and nobody takes the room it waits for
            room_for_all = self._room_for_all()
            if room_for_all <= 0:
                return WAITED_TOKENS
            room = self._chunk_room(sequence.tenant, room_for_all)
            if why := self._why_not(sequence, room):
                passing[sequence.tenant] = why
            elif self._placement.start(sequence, self.batch):
                self._waiting.take(sequence)
                left = len(sequence.token_ids) - sequence.num_computed_tokens
                self._add_chunk(sequence, min(left, room))
                for passed in lacking:
                    passed.num_passed += 1
            else:
                lacking.append(sequence)
                passing[sequence.tenant] = WAITED_BLOCKS
            if any(passed.num_passed >= MAX_PASSED for passed in lacking):
                return WAITED_BLOCKS
        return WAITED_TOKENS if self._rows.num_free else WAITED_ROWS

    def _why_not(self, sequence: Sequence, room: int) -> str:
        """What it must wait for, of tokens, rows and grammars; "" if it may start. room: see `_chunk_room`.

        A preempted sequence may still have tokens in flight: its row is made from known tokens only.
        """
        if sequence.num_pending:
            return WAITED_BLOCKS  # it lost them a moment ago, and others of its tenant wait behind it
        tenant = self._shares.of(sequence.tenant)
        if room <= 0:
            return WAITED_SHARE
        if self._rows.num_free <= self._shares.rows_kept_free(tenant, self._rows.num_rows):
            return WAITED_SHARE
        if sequence.params.grammar and not self._may_bring(sequence.params.grammar):
            return WAITED_GRAMMAR
        return ""

    def _may_bring(self, grammar: str) -> bool:
        """Whether rank 0 has it already, for another row, or gets few others with this step."""
        if grammar in self._new_grammars or any(s.params.grammar == grammar for s in self._rows.running):
            return True
        if len(self._new_grammars) >= MAX_NEW_GRAMMARS:
            return False
        self._new_grammars.add(grammar)
        return True

    def _most_beside_decodes(self) -> int:
        """Prompt tokens of this step that do not make its decodes wait long for the next one."""
        batch = self.batch
        if not batch.num_decodes:
            return self._max_tokens
        count = batch.num_decodes + sum(batch.drafts.values())
        context = batch.steady_context + sum([s.num_computed_tokens for s in batch.decodes if not s.joined])
        seconds = max(_PAUSE_SECONDS, _PAUSE_STEPS * self._pace.step_seconds(count, context))
        affordable = self._pace.more_tokens(seconds, count, context)
        most = min(max(affordable, _LEAST_BESIDE * self._max_tokens, 1), self._max_tokens)
        whole = round((count + most) / _BLOCK_TOKENS) * _BLOCK_TOKENS - count
        return whole if 0 < whole <= self._max_tokens else int(most)

    def _chunk_room(self, name: str, room_for_all: int) -> int:
        """Prompt tokens that the tenant may still have in this step, of those that anybody may."""
        if name in self._yielding:
            return 0
        part = 1.0
        if self._shares.num_present > 1:
            part = max(self._shares.share(self._shares.of(name)) * _CROWDED_PART, _SMALLEST_PART)
        limit = max(int(part * self._max_tokens), 1)
        return min(limit - self._chunk_tokens.get(name, 0), room_for_all)

    def _room_for_all(self) -> int:
        """Prompt tokens that may still be in this step, whoever has them: not many beside decodes.

        Where full steps are long, one with the end of a prompt gets no more than a quarter full: the first token behind
        it comes in a quarter of the time, and those of the rest are computed in the next steps, no later than in a full
        one. (A prompt that is longer by itself is not cut for that.)
        """
        if self._most_beside is None:
            self._most_beside = self._most_beside_decodes()
        in_step = sum(self._chunk_tokens.values())
        room = min(self._most_beside - in_step, self.batch.budget)
        if self.batch.sampled_chunks and self._pace.is_long(self._max_tokens, 0):
            room = min(room, int(_ENDING_PART * self._max_tokens) - in_step)
        return room

    def _add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        self._chunk_tokens[sequence.tenant] = self._chunk_tokens.get(sequence.tenant, 0) + num_tokens
        self._add(sequence, num_tokens)

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the sequence's next tokens; its tenant is charged for them as far as they are new."""
        start = sequence.num_computed_tokens
        samples = self.batch.add(sequence, num_tokens)
        sequence.note_computed(start, sequence.num_computed_tokens)
        units = max(sequence.num_computed_tokens - sequence.num_charged_tokens, 0) + samples
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, sequence.num_computed_tokens)
        sequence.work += units
        self._shares.charge(sequence.tenant, units)
