"""Requests whose gateway is gone, and streams that have just ended: any gateway may take them over. Pure; no clock."""

from __future__ import annotations

from dataclasses import replace

from novainfer.protocol.messages import AddRequest
from novainfer.scheduler.request import Request, Sequence


class Orphans:
    """By request id; the scheduler may have finished and forgotten them meanwhile."""

    def __init__(self, grace: float) -> None:
        """`grace`: seconds."""
        self._grace = grace
        self._entries: dict[str, tuple[float, Request]] = {}  # -> (kept until, request), in the order of that time

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, now: float) -> None:
        """Keep a request from now on. Without a grace time nothing is kept."""
        self._entries[request.request_id] = (now + self._grace, request)

    def pop(self, request_id: str) -> bool:
        """No longer keep this one; whether it was kept."""
        return self._entries.pop(request_id, None) is not None

    def expired(self, now: float) -> list[str]:
        """Take out those whose time is over."""
        over = [request_id for request_id, (until, _) in self._entries.items() if until <= now]
        for request_id in over:
            del self._entries[request_id]
        return over

    def find(self, tenant: str, alias: str, now: float) -> list[AddRequest]:
        """The tenant's requests with this alias, as messages that make an engine go on with them."""
        return [
            _as_message(request, now)
            for _, request in self._entries.values()
            if request.message.tenant == tenant and alias in request.message.aliases
        ]


def _as_message(request: Request, now: float) -> AddRequest:
    message = request.message
    params = message.params
    emitted = [_tokens(sequence) for sequence in request.sequences]
    if params.logprobs is not None or params.prompt_logprobs is not None:
        emitted = [[] for _ in emitted]  # only the gateway had them: they are computed again, and are the same
    deadline = max(request.deadline - now, 1e-3) if message.deadline > 0 else 0.0
    return replace(message, emitted=emitted, deadline=deadline)


def _tokens(sequence: Sequence) -> list[int]:
    """Its output; without the last token if that ended it: sampled again, it comes with the end that belongs to it."""
    end = len(sequence.token_ids) - (sequence.finish_reason() is not None)
    return sequence.token_ids[sequence.request.prompt_len : end]
