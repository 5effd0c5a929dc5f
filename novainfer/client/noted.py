"""What is known of where the time of a live request went, whatever engines had it. Pure, no clock."""

from __future__ import annotations

from dataclasses import replace

from novainfer.protocol.messages import Notes


class Noted:
    """Of a request that asks. An engine's notes are of its own time with it; here those of all its engines are one.

    What an engine has not told before it died is lost.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._now: dict[int, Notes] = {}  # by choice: of the engine that has it
        self._before: dict[int, Notes] = {}  # of those that had it, together
        self._waited = 0.0  # seconds, until it was sent to the engine that has it

    def take(self, notes: Notes) -> None:
        """What the engine that has it says of one choice."""
        self._now[notes.choice] = notes

    def sent(self, waited: float) -> None:
        """Another engine, or the first one, has it from now on, `waited` seconds after it was accepted here."""
        for choice in self._now.keys() | self._before.keys():
            self._before[choice] = self._of(choice)
        self._now.clear()
        self._waited = waited

    def told(self, request_id: str, choice: int) -> Notes:
        """All that is known of a choice; what is not is 0."""
        notes = self._of(choice) if choice in self._now or choice in self._before else Notes(request_id, choice)
        return replace(notes, restarts=self.restarts)

    def _of(self, choice: int) -> Notes:
        before, now = self._before.get(choice), self._now.get(choice)
        if now is not None and now.queue_seconds >= 0:
            now = replace(now, queue_seconds=now.queue_seconds + self._waited)
        if before is None or now is None:
            return before or now or Notes("", choice)
        has_begun = before.queue_seconds >= 0
        return replace(
            now,
            queue_seconds=before.queue_seconds if has_begun else now.queue_seconds,
            waited_for=before.waited_for if has_begun else now.waited_for or before.waited_for,
            prefill_steps=before.prefill_steps + now.prefill_steps,
            preemptions=before.preemptions + now.preemptions,
            recomputed_tokens=before.recomputed_tokens + now.recomputed_tokens,
        )
