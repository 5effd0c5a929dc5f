"""Which requests' time limits have passed. Pure; in the scheduler."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from novainfer.scheduler.request import Request

_VOID_ENTRIES = 64  # so few are not worth the work


class Deadlines:
    """A heap. Entries of requests that have ended stay until they are due, or more than half of all."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, str]] = []  # time, arrival, request id

    def __len__(self) -> int:
        return len(self._entries)

    def watch(self, request: Request, live: Mapping[str, Request]) -> None:
        """From now on, if it has a limit; `live`: all requests that have not ended."""
        if request.deadline == float("inf"):
            return
        if len(self._entries) > 2 * len(live) + _VOID_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[2] in live]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (request.deadline, request.arrival, request.request_id))

    def passed(self, now: float, live: Mapping[str, Request]) -> list[Request]:
        """Those of the live ones whose time is over, each once."""
        found = []
        while self._entries and self._entries[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._entries)
            request = live.get(request_id)
            if request is not None and request.arrival == arrival:
                found.append(request)
        return found
