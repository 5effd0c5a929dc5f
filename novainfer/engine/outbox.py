"""What a scheduler has said to its gateways and not sent yet. Pure; sending is the owner's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages for gateways, in order, until they are sent together.

    send: one message to a socket identity; False if that gateway cannot be reached.
    """

    def __init__(self, send: Callable[[bytes, T], bool]) -> None:
        self._send = send
        self._waiting: list[tuple[bytes, T]] = []

    def put(self, identity: bytes, message: T) -> None:
        """To be sent at the next `flush`."""
        self._waiting.append((identity, message))

    def flush(self) -> set[bytes]:
        """Send all of them. Returns whom one did not reach."""
        waiting, self._waiting = self._waiting, []
        return {identity for identity, message in waiting if not self._send(identity, message)}
