"""When the tokens of a request's choices came, for metrics and its figures."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gateway.context import RequestInfo
from gateway.metrics import GatewayMetrics
from gateway.plain_choice import PlainChoice
from novainfer.client.output import ChoiceOutput


class TokenTimes:
    """By choice, on the performance counter; 0 while there was no token.

    A `PlainChoice` that is begun counts for itself until it is settled.
    """

    def __init__(self, count: int, info: RequestInfo, metrics: GatewayMetrics) -> None:
        self._first = [0.0] * count
        self._last = [0.0] * count
        self._info = info
        self._metrics = metrics

    def came(self, choice: int, count: int) -> None:
        """So many tokens of a choice, now."""
        if not count:
            return
        now, last = time.perf_counter(), self._last[choice]
        self._last[choice] = now
        if not last:
            self._first[choice] = now
            self._metrics.first_token.observe(now - self._info.started)
            return
        self._metrics.between_tokens.observe((now - last) / count, count)

    def begin(self, plains: Iterable[PlainChoice]) -> None:
        """They count from here on."""
        for plain in plains:
            plain.last_at = self._last[plain.choice]

    def settle(self, plains: Iterable[PlainChoice]) -> None:
        """Take over what they have counted."""
        for plain in plains:
            self._last[plain.choice] = max(self._last[plain.choice], plain.last_at)

    def ended(self, outputs: Iterable[ChoiceOutput]) -> None:
        """Observe the time that a token took in each choice, the first one aside."""
        for output, first, last in zip(outputs, self._first, self._last, strict=True):
            if output.num_tokens > 1 and first:
                self._metrics.time_per_token.observe((last - first) / (output.num_tokens - 1))

    def figures(self) -> dict[str, float]:
        """Of the first and the last token of all, in milliseconds since the request came; 0: there was none."""
        first = min(filter(None, self._first), default=self._info.started)
        last = max(self._last)
        return {
            "first_token_ms": round(1000 * (first - self._info.started), 1),
            "last_token_ms": round(1000 * (last - self._info.started), 1) if last else 0,
        }
