"""What a rank warns of is read in the server's log, wherever its own output goes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import zmq

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, ServeConfig
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.supervision import SUPERVISOR_SCHEMA, RankWarning
from novainfer.transport.addresses import RunDir
from novainfer.transport.channel import bind_pull
from workers.launch import RankLaunch, RankPlace
from workers.rank_log import MOST_PER_MINUTE, RankLog

pytestmark = pytest.mark.stage1

WAIT = 60.0  # seconds; an event ends each wait long before
RUN_RANK = "import sys; from workers.launch import RankLaunch; from workers.step_loop import run_rank; "
RUN_RANK += "run_rank(RankLaunch.from_json(sys.argv[1]))"
log = logging.getLogger("workers.any")


class Supervisor:
    """Its end of the line, and what has come over it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.run_dir = RunDir.create(str(folder))
        self.context = context
        self._socket = bind_pull(context, self.run_dir.supervisor())

    def rank_log(self) -> RankLog:
        return RankLog(self.context, self.run_dir.supervisor(), rank=3, epoch=7)

    def warnings(self, count: int) -> list[RankWarning]:
        """All, of which there are `count`; other reports are left out."""
        found: list[RankWarning] = []
        while self._socket.poll(WAIT * 1000 if len(found) < count else 100):
            report = SUPERVISOR_SCHEMA.decode(self._socket.recv())
            if isinstance(report, RankWarning):
                found.append(report)
        assert len(found) == count
        return found


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with zmq.Context() as context:
        yield Supervisor(context, tmp_path / "run")
        context.destroy(linger=0)


def test_warnings_of_any_thread_when_logged_then_told_and_what_is_less_or_a_fault_is_not(
    supervisor: Supervisor,
) -> None:
    with supervisor.rank_log():
        log.info("nothing to worry about")
        log.warning("slower by %d times", 10)
        thread = Thread(target=log.error, args=("x" * 100_000,))
        thread.start()
        thread.join()
        try:
            raise RuntimeError("the end")
        except RuntimeError:
            log.exception("cannot go on")
    log.warning("after the rank's life")
    first, second = supervisor.warnings(2)
    assert first == RankWarning(3, 7, logging.WARNING, "slower by 10 times")
    assert (second.level, set(second.message)) == (logging.ERROR, {"x"})
    assert 1000 < len(second.message) < 3000


def test_given_a_rank_that_warns_of_each_step_when_a_minute_is_full_then_the_last_one_says_that_more_is_left_out(
    supervisor: Supervisor,
) -> None:
    with supervisor.rank_log():
        for number in range(3 * MOST_PER_MINUTE):
            log.warning("step %d", number)
    *others, last = supervisor.warnings(MOST_PER_MINUTE)
    assert [warning.message for warning in others] == [f"step {number}" for number in range(MOST_PER_MINUTE - 1)]
    assert last.message.startswith(f"step {MOST_PER_MINUTE - 1} (")


def test_given_a_clients_words_in_a_warning_when_told_then_they_are_one_line_of_text(supervisor: Supervisor) -> None:
    words = "a grammar cannot be built: no \ud800\n2026-01-01 INFO supervisor: all is\r\nwell"
    with supervisor.rank_log() as handler:  # given to it alone: pytest's own handlers send what is logged as UTF-8
        handler.handle(logging.makeLogRecord({"levelno": logging.WARNING, "msg": words}))
    (warning,) = supervisor.warnings(1)
    assert warning.message == "a grammar cannot be built: no ? 2026-01-01 INFO supervisor: all is well"


def test_given_nobody_who_listens_when_a_rank_warns_then_no_logger_is_asked_to_tell(supervisor: Supervisor) -> None:
    with RankLog(supervisor.context, None, rank=0, epoch=1) as handler:
        assert handler not in logging.getLogger().handlers


def test_worker_process_when_it_warns_while_it_loads_then_the_supervisor_hears_of_it(supervisor: Supervisor) -> None:
    config = ServeConfig(
        model=ModelConfig(model="demo"),
        cache=CacheConfig(num_blocks=16),
        parallel=ParallelConfig(executor="null", device="cpu", threads_per_worker=1),
    )
    run_dir, place = supervisor.run_dir, RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
    executor = ZmqExecutor(run_dir.workers(0), world_size=1, epoch=1, context=supervisor.context)
    launch = RankLaunch(
        config=config, replica=0, place=place, scheduler=run_dir.workers(0), supervisor=run_dir.supervisor()
    )
    with subprocess.Popen([sys.executable, "-c", RUN_RANK, launch.to_json()], stderr=subprocess.PIPE) as process:
        try:
            executor.wait_ready(WAIT)
            executor.close()
            _, errors = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    (warning,) = supervisor.warnings(1)
    assert (warning.rank, warning.epoch, warning.level) == (0, 1, logging.WARNING)
    assert "no answer of this server means anything" in warning.message
    assert errors.decode().count("no answer of this server means anything") == 1, "its own output has it, too"
