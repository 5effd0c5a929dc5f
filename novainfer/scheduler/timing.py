"""Where the time of choices went: waiting, computing the prompt, generating. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Iterable

from novainfer.protocol.messages import Notes, Spread
from novainfer.scheduler.request import Sequence


class Timing:
    """Running totals since the scheduler started, in seconds on its caller's clock.

    What goes on here after another engine, or workers, were lost is not measured: part of its time was spent there.
    """

    def __init__(self) -> None:
        self.queue = Spread()  # accepted -> its first step
        self.prefill = Spread()  # its first step -> its first token
        self.decode = Spread()  # its first token -> its last
        self.inference = Spread()  # its first step -> its last token

    def begin(self, sequences: Iterable[Sequence], now: float | None) -> None:
        """A step with these is submitted, for some the first one. now: None where nobody says."""
        for sequence in sequences:
            if sequence.notes is not None:
                self._note(sequence, sequence.notes, now)
            if now is not None and not sequence.begun_at and not sequence.num_output:
                sequence.begun_at = now
                self.queue.observe(max(now - sequence.request.accepted_at, 0.0))

    @staticmethod
    def _note(sequence: Sequence, notes: Notes, now: float | None) -> None:
        if notes.queue_seconds < 0:
            notes.queue_seconds = 0.0 if now is None else max(now - sequence.request.accepted_at, 0.0)
        if not sequence.num_output:
            notes.prefill_steps += 1

    def first_tokens(self, sequences: Iterable[Sequence], now: float) -> None:
        """A step has ended that computed the last token of these prompts."""
        for sequence in sequences:
            if sequence.begun_at and not sequence.first_token_at and not sequence.finished:
                sequence.first_token_at = now
                self.prefill.observe(now - sequence.begun_at)

    def end(self, sequence: Sequence, now: float | None) -> None:
        """Its last token is there."""
        if now is not None and sequence.first_token_at:
            self.decode.observe(now - sequence.first_token_at)
            self.inference.observe(now - sequence.begun_at)
