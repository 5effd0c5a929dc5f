"""Finds the request that kills the worker group, at the cost of one lonely step per request that may be the one.

When a group dies, whatever ran in its last steps may be the cause. Suspects are then run alone, until each has
either got its next token (and is cleared) or killed the group again (and is given up). Pure; lives in the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from novainfer.scheduler.queue import WaitingQueue
from novainfer.scheduler.request import Sequence

# A death from outside (SIGKILL, a hang, a lost host) says little about what ran: it takes two of them, with no token in
# between, to make a suspect, and two more while it runs alone to convict it.
_OUTSIDE_DEATHS = 2
_REMEMBERED = 1024  # choices that went without a token since a death
QUARANTINED = "This request made the engine fail again and again; it was given up (quarantined)."


@dataclass(slots=True)
class _Record:
    """Deaths that a sequence was in since its last token, and what follows from them."""

    together: int = 0
    alone: int = 0
    is_suspect: bool = False
    is_given_up: bool = False


class Isolation:
    """The suspects, in order of arrival, and the one that is running alone now."""

    def __init__(self) -> None:
        self._suspects: dict[Sequence, None] = {}
        self._records: dict[Sequence, _Record] = {}
        self._lonely: Sequence | None = None
        self._gone: OrderedDict[tuple[str, int], _Record] = OrderedDict()  # by request id and choice

    def __bool__(self) -> bool:
        """Whether there is anybody to `clear`."""
        return bool(self._records)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._suspects

    def next_suspect(self, waiting: WaitingQueue) -> Sequence | None:
        """Who has to run alone next; None if nobody is suspected who runs or waits.

        One that was sent again may be held back: its turn comes when choice 0 has computed the prompt.
        """
        for sequence in self._suspects:
            if sequence.is_running or sequence in waiting:
                return sequence
        return None

    def runs_alone(self, sequence: Sequence | None) -> None:
        """The next step has this suspect alone; None: it is a step like any other."""
        self._lonely = sequence

    def clear(self, sequence: Sequence) -> None:
        """It got a token: it is not what kills."""
        self._suspects.pop(sequence, None)
        self._records.pop(sequence, None)

    def leave(self, sequence: Sequence) -> None:
        """It has ended. What it did is remembered: a gateway whose link broke sends its requests again."""
        self._suspects.pop(sequence, None)
        record = self._records.pop(sequence, None)
        if record is not None:
            self._gone[sequence.request_id, sequence.choice] = record
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)

    def come(self, sequence: Sequence) -> bool:
        """It is new here, or was sent again. False: it was given up, and would kill once more."""
        name = sequence.request_id, sequence.choice
        if self._lonely is not None and (self._lonely.request_id, self._lonely.choice) == name:
            self._lonely = sequence
        record = self._gone.get(name)
        if record is None:
            return True
        if record.is_given_up:
            self._gone.move_to_end(name)
            return False
        self._records[sequence] = self._gone.pop(name)
        if record.is_suspect:
            self._suspects[sequence] = None
        return True

    def after_death(self, running: Iterable[Sequence], *, faulted: bool) -> Sequence | None:
        """The group died with these in flight, as they are now; `faulted`: by its own fault, not from outside.

        Returns the one that has to be given up, if it is known now.
        """
        for sequence in dict.fromkeys(running):
            if sequence.finished:
                continue
            record = self._records.setdefault(sequence, _Record())
            if sequence is self._lonely:
                record.alone += 1
                if faulted or record.alone >= _OUTSIDE_DEATHS:
                    record.is_given_up = True
                    return sequence
            else:
                record.together += 1
                if faulted or record.together >= _OUTSIDE_DEATHS:
                    record.is_suspect = True
                    self._suspects[sequence] = None
        return None
