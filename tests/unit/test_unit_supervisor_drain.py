"""What a SIGTERM does to a server of which not all is ready yet: gateways that are have streams perhaps."""

from __future__ import annotations

import os
import signal

import pytest

from tests.unit import test_unit_supervisor

pytestmark = pytest.mark.unit

Start = test_unit_supervisor.Start
start = test_unit_supervisor.start


def begin_drain(server: test_unit_supervisor.FakeServer, victim: str) -> int:
    """End a server of which gateway 0 alone is ready, and kill the victim while it drains: the victim's pid."""
    server.wait_error("gateway 0 is READY")
    server.process.send_signal(signal.SIGTERM)
    server.wait_error("gateway 0 drains")
    while victim not in server.pids():
        assert server.process.poll() is None
    pid = server.pids()[victim]
    os.kill(pid, signal.SIGKILL)
    return pid


def end_drain(server: test_unit_supervisor.FakeServer) -> str:
    """All ends as it should: what was said on standard output."""
    server.end_drain()
    assert server.process.stdout is not None
    said = server.process.stdout.read()
    status, errors = server.finish()
    assert status == 0, errors
    assert "gateway 0 drained" in server.log()
    return said


def test_given_one_gateway_that_is_ready_when_sigterm_comes_then_it_drains_and_the_engine_is_mended_for_it(
    start: Start,
) -> None:
    server = start("--log-level", "DEBUG", **{"gateway 0": "drain", "gateway 1": "late"})
    begin_drain(server, "scheduler 0")
    server.wait_error("serving again after")
    assert end_drain(server) == "", "a server that ends does not call itself ready"
    assert "scheduler 0 epoch 2 group 1" in server.log()


def test_given_a_replica_that_still_loads_when_sigterm_comes_then_gateways_drain_and_its_death_is_not_the_end(
    start: Start,
) -> None:
    late = {"gateway 1": "late", "replica 1": "late"}
    server = start("--log-level", "DEBUG", "--replicas", "2", **{"gateway 0": "drain", **late})
    pid = begin_drain(server, "replica 1")
    while server.pids()["replica 1"] == pid:
        assert server.process.poll() is None
    assert end_drain(server) == ""
