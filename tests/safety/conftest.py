"""One server for all tests here that only try to hurt it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from novainfer.transport.addresses import RunDir
from tests.safety.doors import serving
from tests.servers import RunningServer


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, RunDir]]:
    """The demo model, served with the default options, and where its sockets are."""
    with serving(tmp_path_factory.mktemp("target")) as running:
        yield running
