"""What a scheduler says to gateways waits until it is sent together."""

from __future__ import annotations

import pytest

from novainfer.engine.outbox import Outbox

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


class Post:
    """An outbox and what has left it."""

    def __init__(self, *lost: str) -> None:
        """lost: messages that do not reach anybody."""
        self.sent: list[tuple[bytes, str]] = []
        self._lost = lost
        self.box = Outbox(self._send)

    def _send(self, identity: bytes, message: str) -> bool:
        self.sent.append((identity, message))
        return message not in self._lost


def test_given_messages_when_flushed_then_they_go_in_their_order_and_once() -> None:
    post = Post()
    messages = [(b"a", "1"), (b"b", "2"), (b"a", "3")]
    for identity, message in messages:
        post.box.put(identity, message)
    assert post.sent == []
    assert post.box.flush() == set()
    assert post.box.flush() == set()
    assert post.sent == messages


def test_given_one_message_that_reaches_nobody_when_flushed_then_all_others_go_and_its_gateway_is_told() -> None:
    post = Post("2")
    messages = [(b"a", "1"), (b"b", "2"), (b"a", "3"), (b"b", "4")]
    for identity, message in messages:
        post.box.put(identity, message)
    assert post.box.flush() == {b"b"}
    assert post.sent == messages
