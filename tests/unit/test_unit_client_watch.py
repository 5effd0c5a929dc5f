"""A client that goes away is noticed, by the connection or by a task, whatever it has sent before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.client_watch import ClientWatch
from tests.unit.http_talk import Talk, in_loop, post

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

LONG = b"x" * 100_000  # uvicorn stops reading at 64 KiB


class Watching:
    """An application that reads its request and then waits for its client to leave."""

    def __init__(self, talk: Talk, *, is_known: bool = True) -> None:
        self.has_read, self.has_lost = asyncio.Event(), asyncio.Event()
        self.watch: ClientWatch | None = None
        self._is_known = is_known
        talk.protocol.app = self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        known: Any = receive if self._is_known else lambda: receive()
        self.watch = ClientWatch(known, self.has_lost.set)
        self.has_read.set()
        await self.has_lost.wait()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("body", [b"{}", LONG], ids=["short", "long"])
@pytest.mark.parametrize("is_split", [True, False])
def test_given_a_client_that_leaves_when_it_is_watched_then_it_is_noticed(
    is_known: bool, body: bytes, is_split: bool
) -> None:
    async def main() -> None:
        talk = Talk(has_door=False)
        application = Watching(talk, is_known=is_known)
        sent = post("/a", body)
        head = sent[: -len(body)]
        for part in (head, body) if is_split else (sent,):
            talk.read(part)
            await asyncio.sleep(0)
        await application.has_read.wait()
        await asyncio.sleep(0)  # a task has its turn
        assert not talk.wire.is_paused  # else nobody would hear of the client
        talk.protocol.connection_lost(None)
        await application.has_lost.wait()

    in_loop(main)


def test_given_a_client_that_has_left_when_it_is_watched_then_it_is_noticed_at_once() -> None:
    async def main() -> None:
        talk = Talk(has_door=False)
        application = Watching(talk)
        talk.read(post("/a"))
        talk.protocol.connection_lost(None)
        await application.has_lost.wait()

    in_loop(main)


@pytest.mark.parametrize("is_known", [True, False])
def test_given_a_watch_that_has_stopped_when_the_client_leaves_then_nobody_is_called(is_known: bool) -> None:
    async def main() -> None:
        talk = Talk(has_door=False)
        application = Watching(talk, is_known=is_known)
        talk.read(post("/a"))
        await application.has_read.wait()
        assert application.watch is not None
        application.watch.stop()
        talk.protocol.connection_lost(None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not application.has_lost.is_set()
        application.has_lost.set()

    in_loop(main)
