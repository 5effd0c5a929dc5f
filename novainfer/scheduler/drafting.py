"""Which decodes of a step may have drafts: all of them together must pay. Pure; in the scheduler."""

from __future__ import annotations

from novainfer.scheduler.drafts import DraftPace, look_period, look_seconds
from novainfer.scheduler.pace import StepPace
from novainfer.scheduler.request import Sequence
from novainfer.scheduler.rows import Rows

MOST_DRAFTS = 96  # in a step: each needs logits over the whole vocabulary
_TRY_EVERY = 64  # steps: drafts that were not expected to pay are tried
_MARGIN = 1.5  # what is expected must be so many times what it costs: most expectations are too high


class Drafting:
    """Is asked at every step, mostly in vain: that must not take long."""

    def __init__(self, pace: StepPace | None = None) -> None:
        """pace: what is known of the time of steps already."""
        self.pace = StepPace() if pace is None else pace
        self.is_on = True  # False: nobody ever has any
        self._quiet_until = 0  # no row looks before this step, unless new ones run by then
        self._num_taken = -1  # rows there had been when this was found: those that leave change nothing

    def is_quiet(self, step: int, rows: Rows) -> bool:
        """Whether nobody is to have drafts in this step."""
        return not self.is_on or (step < self._quiet_until and rows.num_taken == self._num_taken)

    def reconsider(self) -> None:
        """Drafts have come true, or have not: rows may look again sooner than was known."""
        self._quiet_until = 0

    def choose(self, step: int, rows: Rows, room: int) -> dict[int, int]:
        """The most drafts that decodes of this step may have behind their next tokens, by the decode's `id`; none,
        unless all of them together are expected to pay. Each may once in any case, and all now and then: texts change.

        room: how many there may be in all.
        """
        if room <= 0 or self.is_quiet(step, rows):
            return {}
        self._num_taken = rows.num_taken
        drafting = [(sequence, sequence.drafts) for sequence in rows.running if sequence.drafts is not None]
        if not drafting:
            self._quiet_until = step + _TRY_EVERY
            return {}
        count, context = len(rows.running), sum([rows.cohort.num_computed(sequence) for sequence in rows.running])
        period = look_period(count, self.pace.step_seconds(count, context))
        looking = [(sequence, drafts) for sequence, drafts in drafting if drafts.looks(step, period)]
        chosen = self._that_pay(step, looking, rows, context, room) if looking else {}
        shortest = min([drafts.period(period) for _, drafts in drafting])
        # A step may be put together in two passes, the second of which asks again.
        self._quiet_until = step if chosen else step - step % shortest + shortest
        return chosen

    def _that_pay(
        self, step: int, looking: list[tuple[Sequence, DraftPace]], rows: Rows, context: int, room: int
    ) -> dict[int, int]:
        count = len(rows.running)
        seconds, cost = self.pace.step_seconds(count, context), self.pace.cost_of_token(count, context)
        chosen: dict[int, int] = {}
        first: dict[int, int] = {}  # those of them who had none before
        gain, none_found = 0.0, 1.0
        for sequence, drafts in looking:
            computed = rows.cohort.num_computed(sequence)
            if room <= 0 or not (sequence.joined or computed + 1 == sequence.num_tokens):
                continue
            left = sequence.end_len - sequence.num_ahead - computed - 2  # one token is sampled in any case
            wanted = min(drafts.wanted(cost), left, room)
            if wanted > 0:
                chosen[id(sequence)] = wanted
                room -= wanted
                gain += drafts.gain(wanted, cost)
                none_found *= 1.0 - drafts.found
                if not drafts.is_tried:
                    first[id(sequence)] = wanted
        price = (1.0 - none_found) * self.pace.cost_of_drafts(count, context)
        if seconds:
            price += look_seconds(len(chosen)) * count / seconds
        if gain > _MARGIN * price or step % _TRY_EVERY == 0:
            return chosen
        for sequence, drafts in looking:
            if id(sequence) in chosen and id(sequence) not in first:
                drafts.vain += 1  # nor will it pay in a moment, mostly
        return first
