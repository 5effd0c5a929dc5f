"""What a scheduler has counted. Conservation: accepted choices = finished + live ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from novainfer.protocol.messages import FINISH_CANCELLED, FINISH_STOP


@dataclass(slots=True)
class Totals:
    """Running counts since the scheduler started."""

    accepted: int = 0
    choices_accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # choices by the finish reason that we gave them
    stopped_by_string: int = 0  # those of the cancelled that met a stop string, which only their client could see
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0  # tokens
    drafts_accepted: int = 0  # tokens: those of them that came true

    @property
    def by_reason(self) -> dict[str, int]:
        """Choices by the finish reason that their client sees."""
        found = self.stopped_by_string
        moved = {FINISH_STOP: found, FINISH_CANCELLED: -found} if found else {}
        return {reason: self.finished.get(reason, 0) + moved.get(reason, 0) for reason in {**self.finished, **moved}}
