"""The oracle of the simulation, for tests that run a scheduler without one."""

from __future__ import annotations

from novainfer.sim.oracle import OracleExecutor, oracle_stream

__all__ = ["OracleExecutor", "oracle_stream"]
