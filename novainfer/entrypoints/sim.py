"""`novainfer sim`: run scheduler, journal and client logic in simulated worlds, and shrink what goes wrong there."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial

from novainfer.errors import ConfigError
from novainfer.sim.simulation import MODES, Outcome, shrink, simulate

_SEEDS_PER_TASK = 25
_LINES_SHOWN = 40

Job = tuple[int, str]  # seed, mode


def sim_command(arguments: argparse.Namespace) -> int:
    """0 if nothing went wrong, 1 at the first violation, which is made small and printed."""
    if arguments.seeds < 1:
        raise ConfigError("--seeds must be above 0")
    logging.disable(logging.CRITICAL)  # the machines warn of every fault, as they should
    modes = MODES if arguments.mode == "both" else (arguments.mode,)
    jobs = [(seed, mode) for seed in range(arguments.seed, arguments.seed + arguments.seeds) for mode in modes]
    began = time.monotonic()
    num_events, num_runs, failed = 0, 0, []
    for outcome in _run(jobs, max_events=arguments.steps, keep_all=arguments.trace):
        num_runs += 1
        num_events += outcome.num_events
        if arguments.trace:
            print("\n".join(outcome.lines))
        if outcome.violation is not None:
            failed.append(outcome)
            _print_violation(outcome)
        elif len(jobs) <= len(MODES):
            _print_run(outcome)
        if failed and not arguments.keep_going:
            break
    seconds = time.monotonic() - began
    print(f"{num_runs} runs, {num_events} events, {len(failed)} with a violation ({num_runs / seconds:.0f} runs/s)")
    return 1 if failed else 0


def _run(jobs: list[Job], *, max_events: int | None, keep_all: bool) -> Iterator[Outcome]:
    """The outcomes in the order of the jobs; on all cores where that pays."""
    run = partial(_run_one, max_events=max_events, keep_all=keep_all)
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(jobs))
    if len(jobs) <= _SEEDS_PER_TASK or cores == 1:
        yield from map(run, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(cores, logging.disable, (logging.CRITICAL,)) as pool:
        yield from pool.imap(run, jobs, chunksize=_SEEDS_PER_TASK)


def _run_one(job: Job, *, max_events: int | None, keep_all: bool) -> Outcome:
    return simulate(*job, max_events=max_events, keep_all=keep_all)


def _print_run(outcome: Outcome) -> None:
    print(
        f"seed {outcome.seed}, {outcome.mode}: {outcome.num_events} events in {outcome.seconds:.1f} simulated seconds"
    )
    for fault in outcome.faults:
        print(f"  {fault}")
    print(f"  ends: {', '.join(outcome.ends)}")
    print(f"  trace hash: {outcome.trace_hash}")


def _print_violation(outcome: Outcome) -> None:
    small = shrink(outcome)
    print(f"VIOLATION in seed {outcome.seed}, {outcome.mode}: {outcome.violation}")
    print(f"{len(small.faults)} of its {len(outcome.faults)} faults suffice: {small.violation}")
    for fault in small.faults:
        print(f"  {fault}")
    print("the last events:")
    for line in small.lines[-_LINES_SHOWN:]:
        print(f"  {line}")
    print(f"trace hash: {outcome.trace_hash}")
    print(f"to repeat it: novainfer sim {outcome.seed} --mode {outcome.mode}")
