"""What sequences wait for before their first step, for those whose clients ask. Pure; nothing is decided by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from novainfer.protocol.messages import WAITED_WORKERS
from novainfer.scheduler.request import Sequence

_SHORTEST = 1e-6  # seconds; less is what sums of times are off by


class Waits:
    """For how long admission has stood still, and for what. False while nobody is watched: then nothing is counted.

    A sequence waits for what the first one of its tenant waits for, where admission went past that, else for what
    admission stopped at. Seconds by reason are kept for all, and for tenants that were passed what is to be added.
    """

    def __init__(self) -> None:
        self._watched: dict[Sequence, dict[str, float]] = {}  # and the seconds by reason when each came
        self._for_all: defaultdict[str, float] = defaultdict(float)
        self._of_tenants: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._why = ""
        self._passed: Mapping[str, str] = {}
        self._last: float | None = None

    def __bool__(self) -> bool:
        return bool(self._watched)

    def watch(self, sequence: Sequence) -> None:
        """It waits for its first step from now on."""
        if not self._watched:  # what was seen last is of long ago, but for workers that are not there
            self._why, self._passed, self._last = self._why if self._why == WAITED_WORKERS else "", {}, None
            self._for_all.clear()
            self._of_tenants.clear()
        self._watched[sequence] = self._seconds(sequence.tenant)

    def leave(self, sequence: Sequence) -> None:
        """It waits no more: what it waited for longest, while it was watched, stands in its notes."""
        before = self._watched.pop(sequence, None)
        if before is None or sequence.notes is None:
            return
        seconds = {why: total - before.get(why, 0.0) for why, total in self._seconds(sequence.tenant).items()}
        longest = max(seconds, key=lambda why: seconds[why], default="")
        sequence.notes.waited_for = longest if longest and seconds[longest] > _SHORTEST else ""

    def stop(self, why: str, passed: Mapping[str, str]) -> None:
        """Admission has stopped for this reason, "" for none, and went past these tenants for these reasons."""
        self._why, self._passed = why, passed

    def tick(self, now: float) -> None:
        """Time, in seconds, has come to `now`; until then things were as the last `stop` said."""
        if self._watched and self._last is not None:
            elapsed = now - self._last
            if self._why:
                self._for_all[self._why] += elapsed
            for tenant, reason in self._passed.items():
                own = self._of_tenants[tenant]
                own[reason] += elapsed
                if self._why:
                    own[self._why] -= elapsed
        self._last = now

    def _seconds(self, tenant: str) -> dict[str, float]:
        seconds = dict(self._for_all)
        for why, more in self._of_tenants[tenant].items() if tenant in self._of_tenants else ():
            seconds[why] = seconds.get(why, 0.0) + more
        return seconds
