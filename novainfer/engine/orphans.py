"""Requests whose gateway is gone: they go on for a grace time, for another one to take them over. Pure; no clock.

A claim only lends them out: the answer may get lost, and the gateway that asked may die, too. What is its own for good
it sends as any request, and then it is no orphan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from novainfer.protocol.messages import AddRequest
from novainfer.scheduler.request import Request, Sequence


@dataclass(slots=True)
class _Orphan:
    """until: seconds on the caller's clock. claimant: the gateway's socket identity."""

    request: Request
    until: float
    claimant: bytes | None = None


class Orphans:
    """By request id; the scheduler may have finished and forgotten them meanwhile."""

    def __init__(self, grace: float) -> None:
        """`grace`: seconds."""
        self._grace = grace
        self._entries: dict[str, _Orphan] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, now: float) -> None:
        """Keep a request from now on."""
        self._entries[request.request_id] = _Orphan(request, now + self._grace)

    def pop(self, request_id: str) -> bool:
        """No longer keep this one; whether it was kept."""
        return self._entries.pop(request_id, None) is not None

    def expired(self, now: float) -> list[str]:
        """Take out those whose time is over."""
        over = [request_id for request_id, entry in self._entries.items() if entry.until <= now]
        for request_id in over:
            del self._entries[request_id]
        return over

    def claim(self, tenant: str, alias: str, claimant: bytes, now: float) -> list[AddRequest]:
        """Lend the tenant's requests with this alias to a gateway, as messages that make an engine go on with them.

        Nobody else gets them until `release`, or until their time, which begins anew, is over.
        """
        found = [
            entry
            for entry in self._entries.values()
            if entry.request.message.tenant == tenant
            and alias in entry.request.message.aliases
            and entry.claimant in (None, claimant)
        ]
        for entry in found:
            entry.claimant, entry.until = claimant, now + self._grace
        return [_as_message(entry.request, now) for entry in found]

    def release(self, claimant: bytes) -> None:
        """This gateway's link is gone: whoever asks next may have what it has claimed and not sent."""
        for entry in self._entries.values():
            if entry.claimant == claimant:
                entry.claimant = None


def _as_message(request: Request, now: float) -> AddRequest:
    message = request.message
    params = message.params
    emitted = [_tokens(sequence) for sequence in request.sequences]
    if params.prompt_logprobs is not None:
        emitted = [[] for _ in emitted]  # only the gateway had them: all is computed again, and is the same
    deadline = max(request.deadline - now, 1e-3) if message.deadline > 0 else 0.0
    return replace(message, emitted=emitted, deadline=deadline)


def _tokens(sequence: Sequence) -> list[int]:
    """Its output; without the last token if that ended it: sampled again, it comes with the end that belongs to it."""
    end = len(sequence.token_ids) - (sequence.finish_reason() is not None)
    return sequence.token_ids[sequence.request.prompt_len : end]
