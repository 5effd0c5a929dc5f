"""The journal: the truth about every live request. Pure state, no I/O and no clock.

A request's tokens are a function of its record, so whoever holds prompt, parameters, seed and the tokens emitted so
far can let any engine go on with it. Token messages may come twice, late, or from an engine that was replaced; an
entry takes each index once, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from novainfer.client.noted import Noted
from novainfer.client.stream import ShortWay, Sink
from novainfer.errors import ProtocolError
from novainfer.protocol.messages import FINISH_CANCELLED, AddRequest, Notes, PromptLogprobs, TokenOutput


class JournalEntry:
    """One accepted request and what has come of it.

    emitted[c]: token ids of choice c so far.   finish_reasons[c]: None while the choice is live.
    accepted_at: seconds on the caller's clock, from which the deadline counts.
    num_cached_tokens: see `AddRequest`.
    noted: where its time goes, if it asks (`AddRequest.explain`): None else.
    was_sent: an engine may have accepted it; the next one must not refuse it for want of room.
    A request that was taken over from another gateway brings tokens along (`AddRequest.emitted`).
    """

    __slots__ = (
        "_accepted_at",
        "emitted",
        "epoch",
        "finish_reasons",
        "noted",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "request",
        "was_sent",
    )

    def __init__(self, request: AddRequest, *, accepted_at: float = 0.0, epoch: int = 0) -> None:
        self.request = request
        self.epoch = epoch
        self.was_sent = bool(request.emitted)
        self.emitted: list[list[int]] = [list(ids) for ids in request.emitted]
        self.emitted += [[] for _ in range(request.params.n - len(self.emitted))]
        self.finish_reasons: list[str | None] = [None] * request.params.n
        self.num_prompt_logprobs = 0
        self.num_cached_tokens = request.num_cached_tokens
        self.noted = Noted() if request.explain else None
        self._accepted_at = accepted_at

    @property
    def finished(self) -> bool:
        """Every choice has its end."""
        return None not in self.finish_reasons

    def accept(self, output: TokenOutput, epoch: int) -> TokenOutput | None:
        """Record what is new in `output` and return just that, or None where nothing is.

        Drops older epochs, finished choices and indexes it has. Raises `ProtocolError` on a gap, on a token that
        differs from the one recorded, and on a choice that the request does not have.
        """
        if epoch < self.epoch:
            return None
        if not 0 <= output.choice < len(self.emitted):
            raise ProtocolError(f"{output.request_id}: there is no choice {output.choice}")
        if self.finish_reasons[output.choice] is not None:
            return None
        self.epoch = epoch
        emitted = self.emitted[output.choice]
        fresh = _only_new(output, emitted)
        if not fresh.token_ids and fresh.finish_reason is None:
            return None
        if self.num_cached_tokens < 0 and fresh.token_ids:
            self.num_cached_tokens = fresh.num_cached_tokens
        emitted.extend(fresh.token_ids)
        self.finish_reasons[output.choice] = fresh.finish_reason
        if self.noted is not None and fresh.finish_reason is not None:
            if fresh.notes is not None:
                self.noted.take(fresh.notes)
            return replace(fresh, notes=self.told_notes(output.choice))
        return fresh

    def told_notes(self, choice: int) -> Notes | None:
        """What the reader of a choice gets with its end."""
        return None if self.noted is None else self.noted.told(self.request.request_id, choice)

    def accept_prompt_logprobs(self, output: PromptLogprobs, epoch: int) -> PromptLogprobs | None:
        """The same for prompt log-probabilities, which start at prompt token 1."""
        if epoch < self.epoch:
            return None
        have = self.num_prompt_logprobs + 1
        if output.start > have:
            raise ProtocolError(f"{output.request_id}: prompt logprobs {have} to {output.start - 1} are missing")
        entries = output.entries[have - output.start :]
        if not entries:
            return None
        self.num_prompt_logprobs += len(entries)
        return replace(output, start=have, entries=entries)

    def sent(self, now: float) -> None:
        """It goes to an engine that knows nothing of it."""
        self.was_sent = True
        if self.noted is not None:
            self.noted.sent(now - self._accepted_at)

    def finish(self, choice: int, reason: str) -> None:
        """End a choice from this side (a stop string, a cancel); its later tokens are ignored."""
        if self.finish_reasons[choice] is None:
            self.finish_reasons[choice] = reason

    def cancel(self, choice: int = -1) -> None:
        """End one choice, or all (`choice` < 0)."""
        for c in range(len(self.emitted)) if choice < 0 else [choice]:
            self.finish(c, FINISH_CANCELLED)

    def resume_request(self, *, now: float = 0.0) -> AddRequest:
        """What makes an engine that knows nothing go on; `finished_choices` must then be cancelled there."""
        deadline = self.request.deadline
        if deadline > 0:
            deadline = max(deadline - (now - self._accepted_at), 1e-3)  # 0 would mean none
        emitted = [list(ids) for ids in self.emitted]
        return replace(self.request, emitted=emitted, deadline=deadline, num_cached_tokens=self.num_cached_tokens)

    @property
    def finished_choices(self) -> list[int]:
        """The choices that an engine need not go on with."""
        return [c for c, reason in enumerate(self.finish_reasons) if reason is not None]


def taken_over(request: AddRequest, told: Sequence[int]) -> AddRequest:
    """A claimed request as the next gateway submits it, whose reader has `told[c]` tokens of choice c.

    The tokens have come without their log-probabilities, so those that have yet to be told with them are sampled again.
    """
    if request.params.logprobs is None:
        return request
    return replace(request, emitted=[ids[:count] for ids, count in zip(request.emitted, told, strict=True)])


def _only_new(output: TokenOutput, emitted: list[int]) -> TokenOutput:
    known = len(emitted) - output.index
    if known < 0:
        name = f"{output.request_id}/{output.choice}"
        raise ProtocolError(f"{name}: tokens {len(emitted)} to {output.index - 1} are lost")
    if known == 0:
        return output
    overlap = output.token_ids[:known]
    if overlap != emitted[output.index : output.index + len(overlap)]:
        raise ProtocolError(f"{output.request_id}/{output.choice}: a token came again and differs")
    return replace(output, index=len(emitted), token_ids=output.token_ids[known:], logprobs=output.logprobs[known:])


@dataclass(slots=True, eq=False)
class LiveChoice:
    """A choice by its number (`AddRequest.ref`)."""

    entry: JournalEntry
    choice: int
    emitted: list[int]  # the entry's

    def goes_on(self, index: int, epoch: int) -> bool:
        """Whether a plain token is just the next one, with nothing else to record: the choice has begun here."""
        entry = self.entry
        is_next = len(self.emitted) == index > 0 and entry.epoch == epoch
        return is_next and entry.finish_reasons[self.choice] is None


@dataclass(frozen=True, slots=True)
class Moved:
    """A live request between two sessions: where its outputs go, and plain tokens of its choices."""

    entry: JournalEntry
    sink: Sink
    ways: Mapping[int, ShortWay]


class Journal:
    """The live entries by request id, their choices by number, and the short ways of live ones by the same."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}
        self._next_ref = 0
        self.choices: dict[int, LiveChoice] = {}
        self.ways: dict[int, ShortWay] = {}
        self._of_tenant: dict[str, int] = {}  # live entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        """A snapshot: entries may be removed meanwhile."""
        return iter(list(self._entries.values()))

    def add(self, entry: JournalEntry) -> None:
        """Its request gets its numbers. Raises `ValueError` if the id is taken."""
        request_id = entry.request.request_id
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is in the journal already")
        self._entries[request_id] = entry
        self._of_tenant[entry.request.tenant] = self.num_of(entry.request.tenant) + 1
        entry.request = entry.request.numbered(self._next_ref)
        for choice, emitted in enumerate(entry.emitted):
            self.choices[self._next_ref + choice] = LiveChoice(entry, choice, emitted)
        self._next_ref += len(entry.emitted)

    def num_of(self, tenant: str) -> int:
        """Live entries of a tenant."""
        return self._of_tenant.get(tenant, 0)

    def get(self, request_id: str) -> JournalEntry | None:
        """The live entry, if there is one."""
        return self._entries.get(request_id)

    def shorten(self, entry: JournalEntry, choice: int, way: ShortWay) -> None:
        """Further plain tokens of a live entry's choice may go that way, until the choice ends."""
        if entry.finish_reasons[choice] is None:
            way.emitted = entry.emitted[choice]
            self.ways[entry.request.ref + choice] = way

    def ways_of(self, entry: JournalEntry) -> dict[int, ShortWay]:
        """The short ways of a live entry's choices."""
        ref = entry.request.ref
        return {ref_ - ref: self.ways[ref_] for ref_ in range(ref, ref + len(entry.emitted)) if ref_ in self.ways}

    def end_ways(self, entry: JournalEntry) -> None:
        """Those of its choices that have ended are no more."""
        for choice in entry.finished_choices:
            self.ways.pop(entry.request.ref + choice, None)

    def remove(self, request_id: str) -> JournalEntry | None:
        """Forget a request that has ended."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            left = self._of_tenant.pop(entry.request.tenant) - 1
            if left:
                self._of_tenant[entry.request.tenant] = left
            for choice in range(len(entry.emitted)):
                self.choices.pop(entry.request.ref + choice, None)
                self.ways.pop(entry.request.ref + choice, None)
        return entry
