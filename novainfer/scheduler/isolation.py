"""Finds the request that kills the worker group, at the cost of one lonely step per request that may be the one.

When a group dies, whatever ran in its last steps may be the cause. Suspects are then run alone, until each has
either got its next token (and is cleared) or killed the group again (and is given up). Pure; lives in the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from novainfer.scheduler.request import Sequence

# A death from outside (SIGKILL, a hang, a lost host) says little about what ran: it takes two of them, with no token in
# between, to make a suspect, and two more while it runs alone to convict it.
_OUTSIDE_DEATHS = 2
_REMEMBERED = 1024  # choices that were given up


@dataclass(slots=True)
class _Record:
    """Deaths that a sequence was in since its last token."""

    together: int = 0
    alone: int = 0


class Isolation:
    """The suspects, in order of arrival, and the one that is running alone now."""

    def __init__(self) -> None:
        self._suspects: dict[Sequence, None] = {}
        self._records: dict[Sequence, _Record] = {}
        self._lonely: Sequence | None = None
        self._given_up: OrderedDict[tuple[str, int], None] = OrderedDict()  # (request id, choice)

    def __bool__(self) -> bool:
        """Whether there is anybody to `clear`."""
        return bool(self._records)

    def has_given_up(self, sequence: Sequence) -> bool:
        """Its request was sent again by a gateway that the word of its end has not reached: it would kill once more."""
        return (sequence.request.request_id, sequence.choice) in self._given_up

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._suspects

    def next_suspect(self) -> Sequence | None:
        """Who has to run alone next; None if nobody is suspected."""
        return next(iter(self._suspects), None)

    def runs_alone(self, sequence: Sequence | None) -> None:
        """The next step has this suspect alone; None: it is a step like any other."""
        self._lonely = sequence

    def clear(self, sequence: Sequence) -> None:
        """It got a token, or its end: it is not what kills."""
        self._suspects.pop(sequence, None)
        self._records.pop(sequence, None)

    def after_death(self, running: Iterable[Sequence], *, faulted: bool) -> Sequence | None:
        """The group died with these sequences in flight; `faulted`: by its own fault, not from outside.

        Returns the one that has to be given up, if it is known now.
        """
        for sequence in dict.fromkeys(running):
            if sequence.finished:
                continue
            record = self._records.setdefault(sequence, _Record())
            if sequence is self._lonely:
                record.alone += 1
                if faulted or record.alone >= _OUTSIDE_DEATHS:
                    self._give_up(sequence)
                    return sequence
            else:
                record.together += 1
                if faulted or record.together >= _OUTSIDE_DEATHS:
                    self._suspects[sequence] = None
        return None

    def _give_up(self, sequence: Sequence) -> None:
        self._given_up[sequence.request.request_id, sequence.choice] = None
        if len(self._given_up) > _REMEMBERED:
            self._given_up.popitem(last=False)
