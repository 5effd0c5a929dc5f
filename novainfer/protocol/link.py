"""Numbered packets between one gateway process and one scheduler process; the contract is in docs/reliability.md."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from novainfer.errors import ProtocolError
from novainfer.protocol.messages import GATEWAY_SCHEMA

WINDOW = 4096  # packets that a scheduler may be ahead of what a gateway has taken
BEAT_SECONDS = 0.25  # so often each side says something

_HEADER = struct.Struct("<QQQ")


@dataclass(slots=True)
class Packet:
    """One record of GATEWAY_SCHEMA, the link it belongs to, and its number there.

    origin: of a scheduler's packets, the epoch in which its process began. One link's Hello may reach two schedulers,
    the second time when the first one is dead; numbers alone would not tell whose packet it is. 0 from a gateway.
    """

    link: int
    number: int
    message: object
    origin: int = 0

    def frames(self) -> list[bytes]:
        """For the wire."""
        return [_HEADER.pack(self.link, self.number, self.origin), GATEWAY_SCHEMA.encode(self.message)]

    @classmethod
    def of(cls, frames: Sequence[bytes]) -> Packet:
        """Raises `ProtocolError` for what is no packet."""
        if len(frames) != 2 or len(frames[0]) != _HEADER.size:
            raise ProtocolError("a packet is a header of 24 bytes and a record")
        link, number, origin = _HEADER.unpack(frames[0])
        return cls(link, number, GATEWAY_SCHEMA.decode(frames[1]), origin)


def packets_in(frames: Sequence[bytes]) -> Iterator[Packet]:
    """The packets of one message, in order; a gateway sends several in one.

    Raises `ProtocolError` where it comes to what is no packet: what follows counts as lost.
    """
    if not frames:
        raise ProtocolError("a message without a packet")
    for start in range(0, len(frames), 2):
        yield Packet.of(frames[start : start + 2])


class Inbox:
    """Tells the packets of one link that are new from those that came before, and finds gaps."""

    def __init__(self) -> None:
        self.num_taken = 0

    def is_new(self, number: int) -> bool:
        """Raises `ProtocolError` if packets before this one were lost."""
        if number > self.num_taken:
            raise ProtocolError(f"packets {self.num_taken} to {number - 1} are lost")
        is_new = number == self.num_taken
        self.num_taken += is_new
        return is_new
