"""Which decodes of a step may have drafts: all of them together must pay. Pure; in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from novainfer.scheduler.cohort import Cohort
from novainfer.scheduler.drafts import DraftPace, look_period, look_seconds
from novainfer.scheduler.pace import StepPace
from novainfer.scheduler.request import Sequence

_MOST_DRAFTS = 96  # in a step: each needs logits over the whole vocabulary
_TRY_EVERY = 64  # steps: drafts that were not expected to pay are tried
_MARGIN = 1.5  # what is expected must be so many times what it costs: most expectations are too high
_RESTLESS = 8  # steps after one with drafts, in which its result may make rows look again


class Drafting:
    """Looks at every step, mostly in vain: it must not take long."""

    def __init__(self, pace: StepPace | None = None) -> None:
        """pace: what is known of the time of steps already."""
        self.pace = StepPace() if pace is None else pace
        self._quiet_until = 0  # no row that was there looks before this step
        self._restless_until = 0
        self._rows_known: tuple[int, Sequence | None] = (0, None)  # how many these were, and the newest one

    def choose(self, step: int, running: Rows[Sequence], cohort: Cohort, room: int) -> dict[int, int]:
        """The most drafts that decodes of this step may have behind their next tokens, by the decode's `id`; none,
        unless all of them together are expected to pay. Each may once in any case, and all now and then: texts change.

        room: tokens that the step may have beside one for each row.
        """
        rows = (len(running), running[-1] if running else None)
        if (step < self._quiet_until and rows == self._rows_known) or room <= 0:
            return {}
        self._rows_known = rows
        drafting = [(sequence, sequence.drafts) for sequence in running if sequence.drafts is not None]
        period = (
            look_period(len(running), self.pace.step_seconds(len(running), _context(running, cohort)))
            if drafting
            else 1
        )
        looking = [(sequence, drafts) for sequence, drafts in drafting if drafts.looks(step, period)]
        chosen = self._that_pay(step, looking, running, cohort, min(room, _MOST_DRAFTS)) if looking else {}
        if chosen:
            self._restless_until = step + _RESTLESS
        if step >= self._restless_until:
            shortest = min([drafts.period(period) for _, drafts in drafting], default=_TRY_EVERY)
            self._quiet_until = step - step % shortest + shortest
        return chosen

    def _that_pay(
        self,
        step: int,
        looking: list[tuple[Sequence, DraftPace]],
        running: Rows[Sequence],
        cohort: Cohort,
        room: int,
    ) -> dict[int, int]:
        count, context = len(running), _context(running, cohort)
        seconds, cost = self.pace.step_seconds(count, context), self.pace.cost_of_token(count, context)
        chosen: dict[int, int] = {}
        first: dict[int, int] = {}  # those of them who had none before
        gain, none_found = 0.0, 1.0
        for sequence, drafts in looking:
            computed = cohort.num_computed(sequence)
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
                    drafts.is_tried = True
                    first[id(sequence)] = wanted
        price = (1.0 - none_found) * self.pace.cost_of_drafts(count, context)
        if seconds:
            price += look_seconds(len(chosen)) * count / seconds
        return chosen if gain > _MARGIN * price or step % _TRY_EVERY == 0 else first


def _context(running: Rows[Sequence], cohort: Cohort) -> int:
    """Tokens that they attend to."""
    return sum([cohort.num_computed(sequence) for sequence in running])
