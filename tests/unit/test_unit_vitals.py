"""When a process counts as hung, and how often what dies is started again."""

from __future__ import annotations

import pytest

from novainfer.config import ServerConfig
from novainfer.engine.restarts import DELAYS, STABLE_SECONDS, Restarts
from novainfer.entrypoints.children import ChildState, Phase
from novainfer.entrypoints.replacements import Replacements
from novainfer.entrypoints.vitals import STOPPED_TIMEOUT, Watch, felt, felt_scheduler, forgive, hang, heard, standstill
from novainfer.protocol.supervision import RankPulse, SchedulerPulse

pytestmark = pytest.mark.unit

CONFIG = ServerConfig(hang_timeout=4.0, stall_timeout=60.0)


def rank(index: int = 0, phase: Phase = Phase.READY) -> ChildState:
    child = ChildState("worker", index, 1, phase)
    heard(child, 0.0)
    return child


def pulse(child: ChildState, now: float, *, is_busy: bool, progress: int) -> None:
    felt(child, RankPulse(child.index, 1, is_busy, progress), now)


def words(children: list[ChildState], now: float, *, stopped: bool = False) -> str | None:
    found = hang(children, CONFIG, now, is_stopped=lambda child: stopped)
    return None if found is None else found[1]


def test_given_a_rank_that_was_never_heard_when_time_passes_then_it_does_not_hang() -> None:
    assert words([ChildState("worker", 0, 1)], 1e6) is None


@pytest.mark.parametrize(("phase", "patience"), [(Phase.READY, 4.0), (Phase.STARTED, 60.0)])
def test_given_a_silent_rank_when_its_patience_is_over_then_it_hangs(phase: Phase, patience: float) -> None:
    assert words([rank(phase=phase)], patience) is None
    assert words([rank(phase=phase)], patience + 0.1) == f"worker 0 hangs: silent for {patience + 0.1:.1f} s"


@pytest.mark.parametrize("phase", [Phase.STARTED, Phase.READY])
@pytest.mark.parametrize("role", ["worker", "scheduler", "gateway"])
def test_given_a_stopped_process_when_it_is_silent_for_a_second_then_it_hangs(role: str, phase: Phase) -> None:
    child = ChildState(role, 0, 1, phase)
    heard(child, 0.0)
    assert words([child], STOPPED_TIMEOUT, stopped=True) is None
    assert words([child], STOPPED_TIMEOUT + 0.1, stopped=True) == f"{role} 0 hangs: silent for 1.1 s"


def test_given_a_ready_gateway_when_it_is_silent_then_it_has_the_patience_of_a_long_call() -> None:
    child = ChildState("gateway", 0, 1, Phase.READY)
    heard(child, 0.0)
    assert words([child], 60.0) is None
    assert words([child], 60.1) == "gateway 0 hangs: silent for 60.1 s"


@pytest.mark.parametrize(("stopped", "patience"), [(True, STOPPED_TIMEOUT), (False, 60.0)])
def test_given_a_process_that_has_not_said_a_word_when_its_patience_is_over_then_it_hangs(
    stopped: bool, patience: float
) -> None:
    child = ChildState("scheduler", 0, 1, spawned_at=0.0)
    assert words([child], patience, stopped=stopped) is None
    assert words([child], patience + 0.1, stopped=stopped) is not None


def test_given_a_scheduler_without_workers_when_it_is_silent_then_it_hangs_as_soon_as_one_with_them() -> None:
    child = ChildState("scheduler", 0, 1, Phase.STARTED)
    heard(child, 0.0)
    assert words([child], 4.1) is not None


def test_given_a_busy_rank_when_its_counter_stands_still_then_it_hangs_and_an_idle_one_does_not() -> None:
    busy, idle = rank(), rank()
    for second in range(62):
        pulse(busy, second, is_busy=True, progress=7)
        pulse(idle, second, is_busy=False, progress=7)
    assert words([idle], 61.5) is None
    assert words([busy], 61.5) == "worker 0 hangs: no progress for 61.5 s"


def test_given_a_slow_step_when_its_layers_go_on_then_it_does_not_hang() -> None:
    child = rank()
    for second in range(600):
        pulse(child, second, is_busy=True, progress=second // 50)
    assert words([child], 600.0) is None


def test_given_a_rank_that_waits_for_an_idle_one_when_time_passes_then_it_hangs_soon() -> None:
    busy, idle = rank(0), rank(1)
    for second in range(6):
        pulse(busy, second, is_busy=True, progress=7)
        pulse(idle, second, is_busy=False, progress=7)
    assert words([busy, idle], 5.0) == "worker 0 hangs: no progress for 5.0 s"
    pulse(idle, 5.0, is_busy=True, progress=8)
    assert words([busy, idle], 5.0) is None


def parted(scheduler: ChildState, ranks: list[ChildState], now: float) -> bool:
    return standstill(ranks, scheduler, CONFIG, now) is not None


@pytest.mark.parametrize("phase", [Phase.STARTED, Phase.READY])  # nobody has said hello; a plan or its answer is due
def test_given_idle_ranks_when_the_scheduler_waits_for_them_all_the_time_then_their_link_is_broken(
    phase: Phase,
) -> None:
    scheduler, ranks = ChildState("scheduler", 0, 1, phase), [rank(0), rank(1)]
    for second in range(6):
        felt_scheduler(scheduler, SchedulerPulse(0, 1, 7, waits=True), second)
        for each in ranks:
            pulse(each, second, is_busy=False, progress=7)
    assert not parted(scheduler, ranks, 4.0)
    assert parted(scheduler, ranks, 4.1)
    ranks[1].phase = Phase.STARTED
    assert not parted(scheduler, ranks, 4.1)


def test_given_ranks_that_were_idle_for_long_when_a_new_scheduler_says_nothing_yet_then_nobody_is_to_blame() -> None:
    ranks = [rank(0), rank(1)]
    for second in range(600):
        for each in ranks:
            pulse(each, second, is_busy=False, progress=7)
    scheduler = ChildState("scheduler", 0, 2, Phase.STARTED)
    assert not parted(scheduler, ranks, 600.0)
    felt_scheduler(scheduler, SchedulerPulse(0, 2, 0, waits=True), 600.0)
    assert not parted(scheduler, ranks, 604.0)
    assert parted(scheduler, ranks, 604.1)


@pytest.mark.parametrize("sign", ["a layer", "a step", "an idle scheduler"])
def test_given_a_scheduler_that_waits_when_anything_moves_then_the_link_is_well(sign: str) -> None:
    scheduler, ranks = ChildState("scheduler", 0, 1, Phase.READY), [rank(0), rank(1)]
    for second in range(9):
        steps = SchedulerPulse(0, 1, second // 3 if sign == "a step" else 7, waits=sign != "an idle scheduler")
        felt_scheduler(scheduler, steps, second)
        pulse(ranks[0], second, is_busy=False, progress=7)
        pulse(ranks[1], second, is_busy=False, progress=second // 3 if sign == "a layer" else 7)
    assert not parted(scheduler, ranks, 9.0)


def test_given_a_rank_whose_word_was_lost_when_its_pulse_says_that_it_is_ready_then_it_is() -> None:
    child = ChildState("worker", 0, 1)
    felt(child, RankPulse(0, 1, False, 0, num_blocks=9), 50.0)
    assert (child.phase, child.num_blocks) == (Phase.READY, 9)
    assert words([child], 54.1) is not None
    child.phase = Phase.EXITED
    felt(child, RankPulse(0, 1, False, 0, num_blocks=9), 51.0)
    assert child.phase == Phase.EXITED


def test_given_a_supervisor_that_was_away_when_it_is_back_then_nobody_is_to_blame() -> None:
    child = rank()
    forgive([child], 100.0)
    assert words([child], 103.0) is None


class Server:
    """One process of each kind, all stopped or none; `watch` is what the supervisor does with its turns."""

    def __init__(self) -> None:
        self.children = [ChildState(role, 0, 1, Phase.READY) for role in ("worker", "scheduler", "gateway")]
        self.children.append(ChildState("gateway", 1, 1, spawned_at=0.0))
        self.stopped: list[ChildState] = []
        self._watch = Watch(CONFIG, lambda child: child in self.stopped)

    def turns(self, begin: float, end: float) -> list[str]:
        """Look four times a second; who is not stopped has just sent a pulse. The names of those who hang."""
        hung: list[str] = []
        for turn in range(int(begin * 4), int(end * 4) + 1):
            for child in self.children:
                if child not in self.stopped:
                    heard(child, turn / 4)
            hung += [child.name for child, _ in self._watch.look(self.children, turn / 4)]
        return hung


def test_given_a_whole_server_that_was_stopped_when_others_go_on_after_the_supervisor_then_nobody_hangs() -> None:
    server = Server()
    assert server.turns(0.0, 5.0) == []
    server.stopped = list(server.children)
    assert server.turns(8.0, 9.0) == []  # only the supervisor runs
    server.stopped = []
    assert server.turns(9.25, 20.0) == []


def test_given_a_whole_server_that_was_stopped_when_others_do_not_go_on_then_each_of_them_hangs() -> None:
    server = Server()
    server.stopped = [server.children[3]]  # it has not said a word
    server.turns(0.0, 0.0)
    server.stopped = list(server.children)
    assert server.turns(8.0, 9.25) == ["worker 0", "scheduler 0", "gateway 0", "gateway 1"]


def test_given_deaths_without_a_step_when_there_were_six_then_it_is_given_up() -> None:
    restarts = Restarts(len(DELAYS), STABLE_SECONDS)
    assert [restarts.delay(0.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]


@pytest.mark.parametrize("sign", ["step", "long life"])
def test_given_deaths_when_the_engine_works_in_between_then_they_are_forgotten(sign: str) -> None:
    restarts = Restarts(len(DELAYS), STABLE_SECONDS)
    for _ in range(20):
        assert restarts.delay(1000.0) == 0.0
        assert restarts.delay(1000.0) == 1.0
        restarts.serves(1000.0 - STABLE_SECONDS - 1 if sign == "long life" else 1000.0)
        if sign == "step":
            restarts.step_ended()


def test_gateways_that_die_again_and_again_when_replaced_then_they_are_given_up_and_the_engine_is_not() -> None:
    replacements = Replacements(ServerConfig(), 0.0)
    delays = []
    for _ in range(len(DELAYS)):
        delays.append(replacements.gateway_died(1.0))
    assert tuple(delays) == DELAYS
    assert replacements.gateway_died(4.0) is None
    assert replacements.engine_died(4.0) == 0.0


def test_gateways_that_die_again_and_again_when_each_was_ready_then_they_are_replaced_at_once() -> None:
    replacements = Replacements(ServerConfig(), 0.0)
    for number in range(20):
        assert replacements.gateway_died(10.0 * number) == 0.0
        assert replacements.is_going_on
        assert replacements.all_ready(10.0 * number + 1.0) == 1.0


def test_replacements_when_their_time_comes_then_each_is_due_once() -> None:
    replacements = Replacements(ServerConfig(), 0.0)
    replacements.schedule("gateway", 1, 2.0)
    replacements.schedule("scheduler", 0, 1.0)
    assert replacements.take_due(0.5) == []
    assert replacements.take_due(1.0) == [("scheduler", 0)]
    assert replacements.take_due(3.0) == [("gateway", 1)]
    assert replacements.take_due(3.0) == []
