"""Runs an `EngineCore` over the oracle to the end and collects what clients would see."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from novainfer.config import CacheConfig, SchedulerConfig, ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.protocol.messages import AddRequest, TokenOutput
from novainfer.sampling.params import SamplingParams
from tests.oracle import OracleExecutor

Streams = dict[tuple[str, int], list[int]]


class Driver:
    """An engine on an oracle; `streams[(request, choice)]` are the tokens, `ends` the finish reasons."""

    def __init__(self, executor: OracleExecutor, *, prefix_caching: bool = True, **scheduler: Any) -> None:
        config = ServeConfig(
            scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(enable_prefix_caching=prefix_caching)
        )
        self.executor = executor
        self.engine = EngineCore(executor, config)
        self.streams: Streams = defaultdict(list)
        self.ends: dict[tuple[str, int], str] = {}
        self.outputs: list[TokenOutput] = []

    def add(self, request_id: str, prompt: list[int], **options: object) -> None:
        self.record(self.engine.add(make_message(request_id, prompt, **options), now=0.0))

    def record(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.choice)
            assert key not in self.ends, f"{key} got something after its end"
            assert output.index >= len(self.streams[key])
            self.streams[key].extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[key] = output.finish_reason
            self.outputs.append(output)

    def use(self, executor: OracleExecutor) -> None:
        """Other workers take over, after `engine.lose_workers`."""
        self.executor = executor
        self.record(self.engine.attach_workers(executor))

    def step(self) -> bool:
        submitted = self.engine.submit()
        outputs = self.engine.collect(None)
        if outputs is not None:
            self.record(outputs.outputs)
        self.check_invariants()
        return bool(submitted) or outputs is not None

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert self.engine.is_idle, "nothing moves but requests are left"
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def check_invariants(self) -> None:
        scheduler = self.engine.scheduler
        pool = scheduler.kv.pool
        owners: dict[int, int] = defaultdict(int)
        for request in scheduler.requests.values():
            for sequence in request.sequences:
                for block in sequence.table.blocks:
                    owners[block] += 1
        assert all(pool.references(b) == owners[b] for b in range(pool.num_blocks))
        assert pool.num_free == sum(1 for b in range(pool.num_blocks) if owners[b] == 0)
        assert [s.age for s in scheduler.running] == sorted(s.age for s in scheduler.running)
        live = [s for r in scheduler.requests.values() for s in r.sequences if not s.finished]
        assert scheduler._num_live == len(live)
        if not scheduler.totals.preemptions:  # a preempted sequence may get tokens while it waits
            assert scheduler.waiting.work == sum(s.work_left for s in live if not s.is_running)


def make_message(request_id: str, prompt: list[int], **options: object) -> AddRequest:
    """`options`: fields of AddRequest or SamplingParams."""
    own = {key: options.pop(key) for key in list(options) if key in AddRequest.__dataclass_fields__}
    params = SamplingParams(**{"seed": 0, "max_tokens": 8, **options})  # type: ignore[arg-type]
    return AddRequest(request_id, prompt, params, **own)  # type: ignore[arg-type]
