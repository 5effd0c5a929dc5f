"""The servers of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.blows import STRANGE, Undisturbed
from tests.chaos.streams import run
from tests.servers import RunningServer


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    """A server with the flags that are the parameter; all tests of a module share it."""
    log = tmp_path_factory.mktemp("chaos") / "log"
    server = RunningServer(*request.param, log=log)
    try:
        yield Undisturbed(server, run(server, lambda streams: None))
        server.stop()
        assert STRANGE not in server.errors, "a group was refused that computes otherwise"
    finally:
        if server.process.poll() is None:
            server.kill()
