"""Some hundred simulated servers under faults, every run repeatable to the bit; and the command that runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from novainfer.client.session import GatewaySession
from novainfer.entrypoints.cli import main
from novainfer.sim.faults import Fault
from novainfer.sim.simulation import LIVENESS, MODES, SAFETY, shrink, simulate
from novainfer.sim.world import World

pytestmark = [pytest.mark.unit, pytest.mark.stage1]

_PRINT_HASHES = """
import logging
from novainfer.sim.simulation import MODES, simulate
logging.disable(logging.CRITICAL)
print(*(simulate(seed, mode).trace_hash for seed in range(40, 48) for mode in MODES))
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 250, 50))
def test_given_fifty_seeds_when_simulated_then_nothing_is_wrong(first: int, mode: str) -> None:
    outcomes = [simulate(seed, mode) for seed in range(first, first + 50)]
    wrong = [f"novainfer sim {o.seed} --mode {o.mode}: {o.violation}" for o in outcomes if o.violation is not None]
    assert not wrong


def test_given_many_seeds_when_simulated_then_they_differ_and_all_that_can_happen_to_a_client_does() -> None:
    outcomes = [simulate(seed, SAFETY) for seed in range(80)]
    assert len({outcome.trace_hash for outcome in outcomes}) == len(outcomes)
    ends = {end for outcome in outcomes for end in outcome.ends}
    assert {"done", "cancelled", "refused", "lost with its gateway"} <= ends
    assert any(end.startswith("The request's time limit passed") for end in ends)
    kinds = {fault.kind for outcome in outcomes for fault in outcome.faults}
    assert {"kill", "stop", "zombie", "drop", "reorder", "cut", "clog", "reset", "poison", "not finite"} <= kinds


def test_given_a_seed_when_run_again_then_the_trace_is_the_same_also_under_another_hash_seed() -> None:
    hashes = [simulate(seed, mode).trace_hash for seed in range(40, 48) for mode in MODES]
    for hash_seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_HASHES],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == hashes


def test_given_a_purpose_when_random_numbers_are_drawn_then_no_other_purpose_changes_them() -> None:
    first, second = World(7), World(7)
    second.rng("other").random()
    assert first.rng("faults").random() == second.rng("faults").random() != World(8).rng("faults").random()


def test_given_faults_of_ones_own_when_simulated_then_they_happen_in_place_of_the_seed_s() -> None:
    fault = Fault(0.4, "kill", "scheduler", 0, 0.02, 1)
    outcome = simulate(11, LIVENESS, faults=[fault], keep_all=True)
    assert outcome.violation is None
    assert sum("fault:" in line for line in outcome.lines) == 1
    assert sum("scheduler.2 starts" in line for line in outcome.lines) == 1
    assert simulate(11, LIVENESS, faults=[], keep_all=True).trace_hash != outcome.trace_hash


def break_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """No journal is sent over a link that is not the first."""
    handle_info = GatewaySession._handle_info

    def forget(self: GatewaySession, info: object, now: float) -> None:
        self._is_open = self._is_open or self.num_links > 1
        handle_info(self, info, now)  # type: ignore[arg-type]

    monkeypatch.setattr(GatewaySession, "_handle_info", forget)


def first_violation() -> int:
    return next(seed for seed in range(100) if simulate(seed, LIVENESS).violation is not None)


def test_given_a_bug_when_a_run_finds_it_then_it_shrinks_to_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    break_journals(monkeypatch)
    outcome = simulate(first_violation(), LIVENESS)
    small = shrink(outcome)
    assert small.violation is not None
    assert 1 <= len(small.faults) <= min(2, len(outcome.faults))
    assert set(small.faults) <= set(outcome.faults)


def test_given_a_bug_when_the_command_finds_it_then_it_says_how_to_repeat_it_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_journals(monkeypatch)
    seed = first_violation()
    assert main(["sim", str(seed), "--mode", "liveness"]) == 1
    printed = capsys.readouterr().out
    assert f"VIOLATION in seed {seed}, liveness" in printed
    assert f"novainfer sim {seed} --mode liveness" in printed
    assert "the last events:" in printed


def test_given_good_seeds_when_the_command_runs_them_then_it_exits_with_0_and_prints_what_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sim", "3", "--mode", "safety"]) == 0
    assert simulate(3, SAFETY).trace_hash in capsys.readouterr().out
    assert main(["sim", "3", "--mode", "safety", "--steps", "20", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "scheduler.1 starts with group 1" in printed
    assert "20 events in" in printed
    assert main(["sim", "3", "--seeds", "4"]) == 0
    assert "8 runs, " in capsys.readouterr().out
    assert main(["sim", "3", "--seeds", "0"]) == 2
