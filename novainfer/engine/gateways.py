"""The scheduler's ends of its links to the gateways: numbers, credit, what waits for credit; whose the requests are.

Pure; no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from novainfer.errors import ProtocolError
from novainfer.protocol.columns import column
from novainfer.protocol.link import WINDOW, Inbox, Packet
from novainfer.protocol.merge import merge_outputs
from novainfer.protocol.messages import EngineInfo, Notes, OutputBatch, PromptLogprobs, TokenOutput
from novainfer.scheduler.batch import PlainTokens
from novainfer.scheduler.request import Request, Sequence

_MOST_TOKENS = 2**20  # in one batch: 24 MiB of columns
_MOST_VECTOR_BYTES = 32 * 1024 * 1024  # of embeddings, in one batch


class Owners(dict[str, bytes]):
    """Whose the live requests are: by request id, the socket identity of the gateway. Written item by item."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[list[Sequence], list[tuple[bytes, list[int] | None]]] | None = None

    def parts(self, plain: PlainTokens) -> Iterator[tuple[bytes, PlainTokens]]:
        """The tokens of each gateway; those of requests without one are left out."""
        if self._last is None or self._last[0] is not plain.sequences:
            self._last = plain.sequences, self._places(plain.sequences)
        for identity, places in self._last[1]:
            yield identity, plain if places is None else plain.at(places)

    def _places(self, sequences: list[Sequence]) -> list[tuple[bytes, list[int] | None]]:
        """Where each gateway's are; None: it has them all."""
        owners = list(map(self.get, [sequence.request_id for sequence in sequences]))
        if len(set(owners)) == 1 and owners[0] is not None:
            return [(owners[0], None)]
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for place, identity in enumerate(owners):
            if identity is not None:
                found[identity].append(place)
        return list(found.items())

    def __setitem__(self, request_id: str, identity: bytes) -> None:
        self._last = None
        super().__setitem__(request_id, identity)

    def __delitem__(self, request_id: str) -> None:
        self._last = None
        super().__delitem__(request_id)

    def pop(self, request_id: str, default: Any = None) -> Any:
        """As of any dict, with None as default."""
        self._last = None
        return super().pop(request_id, default)


class GatewayLink:
    """One link to one gateway process.

    send: one packet to it; False if it cannot be reached.   heard_at: seconds on the caller's clock.
    window: packets that may be ahead of what was taken.   origin: as in `Packet`.
    live, untold: by id, the gateway's requests that have not ended; streams that have, but are still being read.
    """

    def __init__(
        self,
        send: Callable[[Packet], bool],
        *,
        gateway_id: str,
        link: int,
        now: float,
        origin: int = 0,
        window: int = WINDOW,
    ) -> None:
        self.gateway_id = gateway_id
        self.link = link
        self.heard_at = now
        self.is_reachable = True
        self.live: dict[str, Request] = {}
        self.untold: dict[str, Request] = {}
        self._send_packet = send
        self._origin = origin
        self._window = window
        self._inbox = Inbox()
        self._num_sent = 0
        self._num_acknowledged = 0
        self._held: _Held | None = None

    def is_new(self, packet: Packet, now: float) -> bool:
        """Whether to handle it. Raises `ProtocolError` if one before it was lost: the link is of no use then."""
        self.heard_at = now
        return self._inbox.is_new(packet.number)

    def acknowledge(self, num_received: int) -> None:
        """The gateway has taken so many packets. Raises `ProtocolError` if there were not so many."""
        if num_received > self._num_sent:
            raise ProtocolError(f"{num_received} packets were taken of {self._num_sent}")
        self._num_acknowledged = max(self._num_acknowledged, num_received)
        if self._held is not None and self._has_credit:
            held, self._held = self._held, None
            for message in held.messages():
                self._send(message)

    def say(self, message: object) -> None:
        """Send now, or when there is credit again."""
        if self._has_credit:
            self._send(message)
        else:
            if self._held is None:
                self._held = _Held()
            self._held.put(message)

    def ended(self, request_id: str) -> None:
        """A request has ended; its last outputs were said before."""
        request = self.live.pop(request_id, None)
        if request is not None and request.message.answer:
            self.untold[request_id] = request

    def reads(self, tenant: str, alias: str) -> bool:
        """Whether the tenant's request with this alias is live here, or has ended and is still being read."""
        return any(request.has_name(tenant, alias) for request in (*self.live.values(), *self.untold.values()))

    def told(self, request_id: str) -> None:
        """Nobody will ask for a request that has ended."""
        self.untold.pop(request_id, None)

    def beat(self, message: object) -> None:
        """Send now, a few times a second: if all that had credit was lost, only what follows can show the gap."""
        self._send(message)

    @property
    def _has_credit(self) -> bool:
        return self._num_sent - self._num_acknowledged < self._window

    def _send(self, message: object) -> None:
        packet = Packet(self.link, self._num_sent, message, self._origin)
        self.is_reachable = self._send_packet(packet) and self.is_reachable
        self._num_sent += 1


class _Held:
    """What a gateway shall hear when it has caught up: the last state of the engine; of outputs all, as one batch."""

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._batches: list[OutputBatch] = []
        self._outputs: dict[tuple[str, int], list[TokenOutput]] = {}
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._notes: dict[tuple[str, int], Notes] = {}  # the last of each choice
        self._others: list[object] = []

    def put(self, message: object) -> None:
        if isinstance(message, EngineInfo):
            self._info = message
        elif isinstance(message, OutputBatch):
            self._batches.append(message)
            self._prompt_logprobs += message.prompt_logprobs
            self._notes |= {(notes.request_id, notes.choice): notes for notes in message.notes}
            for output in message.outputs:
                self._outputs.setdefault((output.request_id, output.choice), []).append(output)
        else:
            self._others.append(message)

    def messages(self) -> list[object]:
        """All of it, in the order in which it is to be sent."""
        messages = [*self._others]
        if self._batches:
            outputs, *later = _cut([merge_outputs(parts) for parts in self._outputs.values()])
            *earlier, last = _joined(self._batches)
            messages += [replace(batch, outputs=[], prompt_logprobs=[], notes=[]) for batch in earlier]
            notes = list(self._notes.values())
            messages.append(replace(last, outputs=outputs, prompt_logprobs=self._prompt_logprobs, notes=notes))
            messages += [OutputBatch(last.epoch, last.step, part) for part in later]
        if self._info is not None:  # last: its epoch may be newer than the outputs', which would count as stale
            messages.append(self._info)
        return messages


def _cut(outputs: list[TokenOutput]) -> list[list[TokenOutput]]:
    """In parts, in order, the embeddings of each of which fit into one message; at least one."""
    parts: list[list[TokenOutput]] = [[]]
    size = 0
    for output in outputs:
        size += len(output.embedding)
        if parts[-1] and size > _MOST_VECTOR_BYTES:
            parts.append([])
            size = len(output.embedding)
        parts[-1].append(output)
    return parts


def _joined(batches: list[OutputBatch]) -> Iterator[OutputBatch]:
    """As few as they may be, in order, with the columns of all: those of a step may be shared, and are not written."""
    together: list[OutputBatch] = []
    num_tokens = 0
    for batch in batches:
        if together and num_tokens + len(batch.refs) > _MOST_TOKENS:
            yield _join(together)
            together, num_tokens = [], 0
        together.append(batch)
        num_tokens += len(batch.refs)
    yield _join(together)


def _join(batches: list[OutputBatch]) -> OutputBatch:
    """The last one, with the columns of all."""
    last = batches[-1]
    joined = replace(last, refs=column(), offsets=column(), token_ids=column(), begun_refs=[], begun_cached=[])
    for batch in batches:
        shift = batch.base - last.base
        joined.refs.extend(batch.refs)
        joined.offsets.extend(batch.offsets if shift == 0 else column([offset + shift for offset in batch.offsets]))
        joined.token_ids.extend(batch.token_ids)
        joined.begun_refs.extend(batch.begun_refs)
        joined.begun_cached.extend(batch.begun_cached)
    return joined
