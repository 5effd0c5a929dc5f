"""A process of its own for the tests of Ray: starts two ranks, generates, reports as one JSON line, and waits.

argv: checkpoint, number of ranks. It closes the executor when its standard input ends.
"""

from __future__ import annotations

import json
import sys

import psutil

from novainfer.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from tests.builders import PlanWriter
from workers.ray_executor import RayExecutor

PROMPT = list(range(60, 90))
NUM_TOKENS = 6


def config(model: str, world_size: int) -> ServeConfig:
    """A small server."""
    return ServeConfig(
        model=ModelConfig(model=model, max_model_len=64),
        cache=CacheConfig(num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=2),
        parallel=ParallelConfig(device="cpu", tensor_parallel_size=world_size, threads_per_worker=1),
    )


def main() -> None:
    """Run the life described above."""
    executor = RayExecutor(config(sys.argv[1], int(sys.argv[2])))
    writer = PlanWriter()
    writer.add(0, PROMPT)
    for count in [len(PROMPT)] + [1] * (NUM_TOKENS - 1):
        executor.submit(writer.plan({0: count}))
    results = [executor.collect(None) for _ in range(NUM_TOKENS)]
    processes = psutil.Process().children(recursive=True)
    report = {
        "tokens": [token for result in results if result is not None for token in result.token_ids],
        "epoch": executor.info.epoch,
        "processes": [(process.pid, process.create_time(), process.cmdline()[:1]) for process in processes],
        "niceness": [process.nice() for process in processes if "novainfer: worker" in process.cmdline()[0]],
        "listening": [
            connection.laddr.ip
            for process in [psutil.Process(), *processes]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ],
    }
    print(json.dumps(report), flush=True)
    sys.stdin.read()
    executor.close()
    assert not psutil.Process().children(recursive=True)


if __name__ == "__main__":
    main()
