"""How long a step takes whose ranks compute nothing: a plan to a rank's process and its result back, over ZeroMQ.

Beside a first token of an idle server it shows what gateway, scheduler, and the client's own connection add.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

import zmq

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import EngineError
from novainfer.executor.zmq_executor import ZmqExecutor
from novainfer.protocol.columns import column
from novainfer.protocol.step import NewRow, StepPlan
from novainfer.sampling.params import SamplingParams
from novainfer.transport.addresses import RunDir
from workers.launch import RankLaunch, RankPlace

_RUN_RANK = "import sys; from workers.launch import RankLaunch; from workers.step_loop import run_rank; "
_RUN_RANK += "run_rank(RankLaunch.from_json(sys.argv[1]))"
_PAUSE = 0.001  # seconds between two trips: a server's processes sleep, too, before a request comes
_PATIENCE = 60.0


def median_seconds(num_input: int, trips: int = 500) -> float:
    """Of one step each for a request of so many tokens. Raises `EngineError` if the rank fails."""
    config = ServeConfig(
        model=ModelConfig(model="demo"),
        cache=CacheConfig(num_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=8),
        parallel=ParallelConfig(executor="null", device="cpu"),
    )
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        run_dir = RunDir.create(folder)
        executor = ZmqExecutor(run_dir.workers(0), world_size=1, epoch=1, context=context)
        place = RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
        launch = RankLaunch(config=config, replica=0, place=place, scheduler=run_dir.workers(0), supervisor=None)
        with subprocess.Popen([sys.executable, "-c", _RUN_RANK, launch.to_json()]) as rank:
            try:
                executor.wait_ready(_PATIENCE)
                found = [_trip(executor, number, num_input) for number in range(trips)]
                executor.close()
                rank.wait(_PATIENCE)
            finally:
                rank.kill()
                executor.close()
    return statistics.median(found[trips // 10 :])


def _trip(executor: ZmqExecutor, number: int, num_input: int) -> float:
    row = NewRow(0, column([7] * num_input), num_input, 0, list(range(-(-num_input // 16))), SamplingParams(seed=0), 0)
    freed = [0] if number else []
    rows, counts = column([0]), column([num_input])
    plan = StepPlan(1, number + 1, rows, counts, freed_rows=freed, new_rows=[row])
    time.sleep(_PAUSE)
    began = time.perf_counter()
    executor.submit(plan)
    if executor.collect(_PATIENCE) is None:
        raise EngineError("a step had no result")
    return time.perf_counter() - began
