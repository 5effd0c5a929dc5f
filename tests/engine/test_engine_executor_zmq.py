"""The scheduler's end of the worker sockets: against ranks played by the test, and against a real worker process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import EngineError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.codec import MAX_MESSAGE_BYTES
from novainfer.protocol.columns import column
from novainfer.protocol.step import (
    WORKER_SCHEMA,
    Adopt,
    IndexedBlock,
    Shutdown,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
)
from novainfer.protocol.supervision import (
    SUPERVISOR_SCHEMA,
    ChildFault,
    ChildReady,
    ChildStarted,
    LoadProgress,
    RankPulse,
)
from novainfer.transport.addresses import Endpoint, RunDir
from novainfer.transport.channel import bind_pull, connect_dealer
from tests.builders import PlanWriter
from workers.launch import RankLaunch, RankPlace

pytestmark = pytest.mark.stage1

WAIT = 30.0  # seconds; an event ends each wait long before
RUN_RANK = "import sys; from workers.launch import RankLaunch; from workers.step_loop import run_rank; "
RUN_RANK += "run_rank(RankLaunch.from_json(sys.argv[1]))"
RUN_SPARE = """
import sys
from dataclasses import replace
from workers.launch import RankLaunch
from workers.step_loop import run_rank
from workers.worker import Worker
launch = RankLaunch.from_json(sys.argv[1])
worker = Worker.build(launch.config, replace(launch.place, epoch=0), lambda stage, done, total: None)
run_rank(launch, worker)
"""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


class Ranks:
    """Two ranks that say what the test tells them to, and the executor they talk to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, epoch: int = 1) -> None:
        self.executor = ZmqExecutor(endpoint, world_size=2, epoch=epoch, context=context)
        self.sockets = [connect_dealer(context, endpoint, f"rank-{rank}-{epoch}".encode()) for rank in range(2)]

    def hello(
        self,
        rank: int,
        *,
        num_blocks: int = 10,
        epoch: int = 1,
        group: int = 1,
        world_size: int = 2,
        mode: str = "cpu",
        **held: Any,
    ) -> None:
        hello = WorkerHello(epoch, group, rank, world_size, num_blocks, 16, 100, 512 - rank, 8, 256, mode=mode, **held)
        self.say(rank, hello)

    def say(self, rank: int, message: object) -> None:
        self.sockets[rank].send(WORKER_SCHEMA.encode(message))

    def ready(self) -> Ranks:
        self.hello(0)
        self.hello(1)
        self.executor.wait_ready(WAIT)
        return self

    def hear(self, rank: int) -> object:
        assert self.sockets[rank].poll(WAIT * 1000)
        return WORKER_SCHEMA.decode(self.sockets[rank].recv())


@pytest.fixture
def ranks(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> Ranks:
    return Ranks(context, Endpoint(f"ipc://{tmp_path}/workers"))


def result(step: int, epoch: int = 1) -> StepResult:
    return StepResult(epoch=epoch, step=step, rows=column([0]), token_ids=column([step]))


def plan(step: int, epoch: int = 1, *, is_first: bool = False) -> StepPlan:
    return StepPlan(epoch=epoch, step=step, rows=column(), num_new_tokens=column(), is_first=is_first)


def test_all_ranks_when_they_say_hello_then_info_is_what_each_can_do(ranks: Ranks) -> None:
    assert ranks.executor.try_ready() is None
    ranks.hello(1, num_blocks=7)
    with pytest.raises(EngineError, match=r"ranks \[0\]"):
        ranks.executor.wait_ready(0.2)
    ranks.hello(0)
    expected = ExecutorInfo(
        epoch=1,
        num_blocks=7,
        block_size=16,
        vocab_size=100,
        max_model_len=511,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        mode="cpu",
    )
    assert ranks.executor.wait_ready(WAIT) == expected
    assert ranks.executor.info == expected


def test_ranks_that_compute_differently_when_they_say_hello_then_engine_error(ranks: Ranks) -> None:
    ranks.hello(0, mode="cpu avx2")
    ranks.hello(1, mode="cpu avx512f")
    with pytest.raises(EngineError, match="cpu avx2, cpu avx512f"):
        ranks.executor.wait_ready(WAIT)


def test_two_plans_when_submitted_then_every_rank_gets_both_and_results_come_in_order(ranks: Ranks) -> None:
    ranks.ready()
    for step in (4, 5):
        ranks.executor.submit(plan(step))
    for rank in range(2):
        assert [ranks.hear(rank), ranks.hear(rank)] == [plan(4, is_first=True), plan(5)]
    assert ranks.executor.collect(0) is None
    ranks.say(0, result(4))
    ranks.say(0, result(5))
    assert ranks.executor.collect(WAIT) == result(4)
    assert ranks.executor.collect(WAIT) == result(5)
    assert ranks.executor.collect(0) is None


def test_a_plan_larger_than_a_message_when_submitted_then_engine_error_and_the_ranks_hear_only_the_next(
    ranks: Ranks,
) -> None:
    ranks.ready()
    blocks = [2**63 - 1] * (MAX_MESSAGE_BYTES // 9 + 1)  # nine bytes each
    too_large = StepPlan(1, 0, rows=column(), num_new_tokens=column(), freed_rows=blocks)
    with pytest.raises(EngineError, match=r"more than a message may have"):
        ranks.executor.submit(too_large)
    ranks.executor.submit(plan(0))
    assert [ranks.hear(rank) for rank in range(2)] == [plan(0, is_first=True)] * 2
    ranks.say(0, result(0))
    assert ranks.executor.collect(WAIT) == result(0)


def test_stale_results_when_they_arrive_then_they_are_dropped(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.submit(plan(0))
    ranks.say(0, result(0, epoch=0))
    ranks.say(0, result(7, epoch=2))
    ranks.say(0, result(0))
    assert ranks.executor.collect(WAIT) == result(0)


def test_wrong_result_when_it_arrives_then_engine_error(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.submit(plan(0))
    ranks.say(0, result(1))
    with pytest.raises(EngineError, match="answered step"):
        ranks.executor.collect(WAIT)


def test_unasked_result_when_it_arrives_then_engine_error(ranks: Ranks) -> None:
    ranks.ready()
    ranks.say(0, result(0))
    with pytest.raises(EngineError):
        ranks.executor.collect(WAIT)


def test_fault_when_loading_or_running_then_engine_error_with_its_words(ranks: Ranks) -> None:
    ranks.hello(0)
    ranks.say(1, WorkerFault(0, 1, "of an older epoch"))
    ranks.say(1, WorkerFault(1, 1, "out of memory"))
    with pytest.raises(EngineError, match="rank 1: out of memory"):
        ranks.executor.wait_ready(WAIT)
    with pytest.raises(EngineError, match="out of memory"):
        ranks.executor.collect(0)


def test_garbage_when_it_arrives_then_it_is_dropped(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.submit(plan(0))
    ranks.sockets[0].send(b"\xc1")
    ranks.sockets[0].send_multipart([b"a", b"b"])
    ranks.say(0, result(0))
    assert ranks.executor.collect(WAIT) == result(0)


def test_foreign_group_when_it_says_hello_then_engine_error(ranks: Ranks) -> None:
    ranks.hello(0, world_size=3)
    with pytest.raises(EngineError, match="does not belong"):
        ranks.executor.wait_ready(WAIT)


def test_plan_of_another_epoch_when_submitted_then_engine_error(ranks: Ranks) -> None:
    ranks.ready()
    with pytest.raises(EngineError, match="epoch 2"):
        ranks.executor.submit(plan(0, epoch=2))


def test_a_failed_group_when_another_one_is_expected_then_only_that_one_is_heard(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.submit(plan(0))
    ranks.say(1, WorkerFault(1, 1, "out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        ranks.executor.collect(WAIT)
    ranks.executor.expect(2, group=2)
    ranks.say(0, result(0))
    ranks.say(1, WorkerFault(1, 1, "out of memory"))
    ranks.hello(0)
    ranks.hello(0, epoch=2, group=2)
    assert ranks.executor.try_ready() is None
    ranks.hello(1, epoch=2, group=2)
    assert ranks.executor.wait_ready(WAIT).epoch == 2
    ranks.executor.submit(plan(4, epoch=2))
    ranks.say(0, result(4, epoch=2))
    assert ranks.executor.collect(WAIT) == result(4, epoch=2)
    assert [ranks.hear(rank) for rank in (0, 0, 1, 1)] == [plan(0, is_first=True), plan(4, epoch=2, is_first=True)] * 2


def test_ranks_of_an_older_epoch_when_a_new_scheduler_finds_them_then_it_adopts_them_with_what_they_hold(
    ranks: Ranks,
) -> None:
    held = [IndexedBlock(3, b"parent", column([1] * 16))]
    ranks.executor.expect(5, group=1)
    for rank in range(2):
        ranks.hello(rank, epoch=4)
        while not ranks.sockets[rank].poll(10):
            assert ranks.executor.try_ready() is None
    assert [ranks.hear(rank) for rank in range(2)] == [Adopt(5)] * 2
    ranks.hello(0, epoch=5, held=held)
    ranks.hello(0, epoch=4)  # it was on its way
    ranks.hello(1, epoch=5)
    assert ranks.executor.wait_ready(WAIT).epoch == 5
    assert ranks.executor.group.held == held
    assert not ranks.sockets[0].poll(0)


def test_executor_when_closed_then_ranks_hear_shutdown(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.close()
    ranks.executor.close()
    assert [ranks.hear(0), ranks.hear(1)] == [Shutdown(1), Shutdown(1)]


def test_executor_when_closed_for_a_successor_then_ranks_hear_nothing(ranks: Ranks) -> None:
    ranks.ready()
    ranks.executor.close(ends_ranks=False)
    ranks.executor.close()
    assert not any(ranks.sockets[rank].poll(200) for rank in range(2)), "closing waits for what was sent"


def launch(run_dir: RunDir, model: str) -> RankLaunch:
    config = ServeConfig(
        model=ModelConfig(model=model, max_model_len=64),
        cache=CacheConfig(num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=2),
        parallel=ParallelConfig(device="cpu", threads_per_worker=1),
    )
    place = RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
    return RankLaunch(
        config=config, replica=0, place=place, scheduler=run_dir.workers(0), supervisor=run_dir.supervisor()
    )


def start(run_dir: RunDir, model: str, code: str = RUN_RANK, known: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    sent = launch(run_dir, model)
    command = [sys.executable, "-c", code, replace(sent, place=replace(sent.place, known=known)).to_json()]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


class Server:
    """The two sockets that a rank's process talks to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self.run_dir = RunDir.create(str(path))
        self.supervisor = bind_pull(context, self.run_dir.supervisor())
        self.executor = ZmqExecutor(self.run_dir.workers(0), world_size=1, epoch=1, context=context)

    def reports(self) -> list[object]:
        """What a process that has ended told the supervisor."""
        received: list[object] = []
        while self.supervisor.poll(100):
            received.append(SUPERVISOR_SCHEMA.decode(self.supervisor.recv()))
        return received


@pytest.fixture
def server(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> Server:
    return Server(context, tmp_path / "run")


def test_launch_when_sent_as_json_then_it_comes_back_equal(tmp_path: Path) -> None:
    sent = launch(RunDir(tmp_path), "demo")
    assert RankLaunch.from_json(sent.to_json()) == sent


def test_worker_process_when_it_runs_then_it_loads_answers_and_leaves(server: Server) -> None:
    executor = server.executor
    with start(server.run_dir, "demo") as process:
        try:
            info = executor.wait_ready(WAIT * 4)
            writer = PlanWriter()
            writer.add(1, [5, 6, 7], logprobs=1)
            for plan in (writer.plan({1: 3}), writer.plan({1: 1})):
                executor.submit(plan)
            first, second = executor.collect(WAIT), executor.collect(WAIT)
            executor.close()
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
    assert (info.num_blocks, info.max_model_len, info.max_num_seqs) == (16, 64, 2)
    assert first is not None
    assert second is not None
    assert (first.step, first.rows, second.step, second.rows) == (0, column([1]), 1, column([1]))
    assert 0 <= second.token_ids[0] < info.vocab_size
    heard = server.reports()
    assert isinstance(heard[0], ChildStarted)
    assert isinstance(heard[-1], ChildReady)
    assert heard[-1] == ChildReady("worker", 0, num_blocks=16, fingerprint=heard[-1].fingerprint)
    assert heard[-1].fingerprint
    assert {report.stage for report in heard if isinstance(report, LoadProgress)} == {"weights", "kv cache", "warm-up"}


@pytest.mark.parametrize("code", [RUN_RANK, RUN_SPARE])
def test_given_a_rank_whose_fingerprint_is_not_known_when_it_has_loaded_then_it_ends_and_says_which(
    server: Server, code: str
) -> None:
    with start(server.run_dir, "demo", code, known=("another", "others")) as process:
        try:
            with pytest.raises(EngineError, match="compute otherwise than those before them"):
                server.executor.wait_ready(WAIT * 4)
            assert process.wait(WAIT) == 1
        finally:
            process.kill()
    fault = server.reports()[-1]
    assert isinstance(fault, ChildFault)
    assert (fault.peer_lost, f"(fingerprint {fault.fingerprint})" in fault.message) == (False, True)
    with start(server.run_dir, "demo", code, known=("another", fault.fingerprint)) as process:
        try:
            server.executor.expect(1, group=1)
            server.executor.wait_ready(WAIT * 4)
            server.executor.close()
            assert process.wait(WAIT) == 0
        finally:
            process.kill()


def test_given_a_worker_that_was_built_without_an_epoch_when_it_becomes_a_rank_then_it_serves_in_the_epoch_given(
    server: Server,
) -> None:
    executor = server.executor
    with start(server.run_dir, "demo", RUN_SPARE) as process:
        try:
            assert executor.wait_ready(WAIT * 4).epoch == 1
            writer = PlanWriter()
            writer.add(1, [5, 6, 7])
            executor.submit(writer.plan({1: 3}))
            assert executor.collect(WAIT) is not None
            executor.close()
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
    heard = [type(report) for report in server.reports() if not isinstance(report, RankPulse)]
    assert heard == [ChildStarted, ChildReady]


def test_worker_process_when_a_plan_cannot_be_then_both_peers_hear_the_fault(server: Server) -> None:
    executor = server.executor
    with start(server.run_dir, "demo") as process:
        try:
            executor.wait_ready(WAIT * 4)
            executor.submit(StepPlan(epoch=1, step=0, rows=column([1]), num_new_tokens=column([1])))
            with pytest.raises(EngineError, match="row that is not in use"):
                executor.collect(WAIT)
            assert process.wait(WAIT) != 0
            assert process.stderr is not None
            assert b"Traceback" in process.stderr.read()
        finally:
            process.kill()
    fault = server.reports()[-1]
    assert isinstance(fault, ChildFault)
    assert "row that is not in use" in fault.message


def test_worker_process_when_the_model_cannot_be_loaded_then_both_peers_hear_why(
    server: Server, tmp_path: Path
) -> None:
    executor = server.executor
    (tmp_path / "empty").mkdir()
    with start(server.run_dir, str(tmp_path / "empty")) as process:
        try:
            with pytest.raises(EngineError, match=r"has no config\.json"):
                executor.wait_ready(WAIT * 4)
            assert process.wait(WAIT) != 0
        finally:
            process.kill()
    assert isinstance(server.reports()[-1], ChildFault)


def test_given_an_owner_who_polls_when_it_hears_then_all_that_has_come_is_known_and_nothing_is_waited_for(
    ranks: Ranks,
) -> None:
    executor, group = ranks.executor, ranks.ready().executor.group
    executor.hear()
    group.check()
    for step in (1, 2):
        group.submit(plan(step))
    ranks.say(0, result(1))
    ranks.sockets[0].send(b"junk")
    ranks.say(0, result(2))
    while group.collect() is None:
        assert executor.socket.poll(WAIT * 1000)
        executor.hear(has_any=True)
    while group.collect() is None:
        assert executor.socket.poll(WAIT * 1000)
        executor.hear(has_any=True)
    ranks.say(1, WorkerFault(1, 1, "broken"))
    assert executor.socket.poll(WAIT * 1000)
    group.check()
    executor.hear(has_any=True)
    with pytest.raises(EngineError, match="broken"):
        group.check()
    assert not executor.socket.poll(0)


def listen_for_ever(executor: ZmqExecutor) -> None:
    while True:
        assert executor.socket.poll(WAIT * 1000)
        executor.listen()


def test_words_that_come_while_no_step_is_out_when_listening_then_nothing_is_left_to_wake_the_poller(
    ranks: Ranks,
) -> None:
    ranks.ready()
    ranks.hello(1)
    ranks.sockets[1].send(b"junk")
    ranks.say(1, WorkerFault(1, 1, "broken"))
    with pytest.raises(EngineError, match="broken"):
        listen_for_ever(ranks.executor)
    assert not ranks.executor.socket.poll(0)
