"""Requests whose gateway is gone: they go on for a grace time, for another one to take them over. Pure; no clock.

A claim only lends them out: the answer may get lost, and the gateway that asked may die, or its reader go away. What is
its own for good it sends as any request, and then it is no orphan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from novainfer.protocol.messages import AddRequest
from novainfer.scheduler.request import Request, Sequence


@dataclass(slots=True)
class _Orphan:
    """until: seconds on the caller's clock. claimant: the socket identity of the gateway that it is lent to."""

    request: Request
    until: float
    claimant: bytes | None = None
    lent_until: float = 0.0


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
        if not self._entries:
            return []
        over = [name for name, entry in self._entries.items() if max(entry.until, entry.lent_until) <= now]
        for request_id in over:
            del self._entries[request_id]
        return over

    def is_lent(self, tenant: str, alias: str) -> bool:
        """Whether one of the tenant's requests with this alias was claimed, and not given back."""
        return any(entry.claimant is not None for entry in self._named(tenant, alias))

    def claim(self, tenant: str, alias: str, claimant: bytes, now: float) -> list[Request]:
        """Lend the tenant's requests with this alias, of which none may be lent, to a gateway.

        Nobody else gets them until `release`, or until their time is over, which is not before the grace time from now.
        """
        found = self._named(tenant, alias)
        for entry in found:
            entry.claimant, entry.lent_until = claimant, now + self._grace
        return [entry.request for entry in found]

    def release(self, claimant: bytes, request_id: str | None = None) -> None:
        """This gateway will not send what it has claimed (this request, or any): whoever asks next may have it.

        The time that it has left is what it would have had without the claim.
        """
        for name, entry in self._entries.items():
            if entry.claimant == claimant and request_id in (None, name):
                entry.claimant, entry.lent_until = None, 0.0

    def _named(self, tenant: str, alias: str) -> list[_Orphan]:
        return [entry for entry in self._entries.values() if entry.request.has_name(tenant, alias)]


def as_message(request: Request, now: float) -> AddRequest:
    """What makes an engine go on with it."""
    message = request.message
    params = message.params
    emitted = [_tokens(sequence) for sequence in request.sequences]
    if params.prompt_logprobs is not None:
        emitted = [[] for _ in emitted]  # only the gateway had them: all is computed again, and is the same
    deadline = max(request.deadline - now, 1e-3) if message.deadline > 0 else 0.0
    return replace(message, emitted=emitted, deadline=deadline, num_cached_tokens=request.num_cached_tokens)


def ends(request: Request) -> list[int]:
    """See `Claimed.num_tokens`."""
    return [sequence.num_output if sequence.finished else -1 for sequence in request.sequences]


def _tokens(sequence: Sequence) -> list[int]:
    """Its output; without the last token if that ended it: sampled again, it comes with the end that belongs to it."""
    end = len(sequence.token_ids) - (sequence.finish_reason() is not None)
    return list(sequence.token_ids[sequence.request.prompt_len : end])
