"""Clients that leave at random moments: nothing is held for them, and nobody else notices."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.chaos import cancels
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2


def test_given_1000_cancels_and_disconnects_when_all_have_left_then_nothing_is_held(server: RunningServer) -> None:
    said = cancels.canary(server)
    ways = asyncio.run(cancels.burst(server.base_url, random.Random(0), 1000))
    assert ways.total() == 1000
    server.wait_until_nothing_is_held()
    assert cancels.canary(server) == said
