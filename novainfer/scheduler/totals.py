"""What a scheduler has counted. Conservation: accepted choices = finished + live ones."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Running counts since the scheduler started."""

    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # choices by finish reason
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
