"""Tenants that send requests one after the other to an engine on the oracle, with a clock that the steps move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from novainfer.config import CacheConfig, KeyDigest, SchedulerConfig, ServeConfig
from novainfer.engine.core import EngineCore
from novainfer.protocol.messages import TokenOutput
from novainfer.sim.oracle import OracleRow
from tests.engine.engine_driver import make_message
from tests.oracle import OracleExecutor

STEP_SECONDS = 0.002  # of a step, beside its tokens
TOKEN_SECONDS = 0.0001


class FastOracle(OracleExecutor):
    """Does not check the KV cache: long contexts would make that slow."""

    def _write(self, row: OracleRow, count: int) -> None:
        pass

    def _read(self, row: OracleRow, end: int) -> bool:
        return True


@dataclass
class Stream:
    """A client of a tenant: as soon as a request has ended it sends the next one."""

    tenant: str
    prompt_len: int
    max_tokens: int
    pause: float = 0.0  # seconds between two requests
    start: float = 0.0
    count: int = 1_000_000  # requests that it sends


class Traffic:
    """Runs streams; `ttft[tenant]` are the seconds to the first tokens, `served[tenant]` the tokens that came out."""

    def __init__(
        self,
        streams: list[Stream],
        *,
        num_blocks: int,
        weights: dict[str, float] | None = None,
        context_seconds: float = 0.0,
        **scheduler: float,
    ) -> None:
        keys = tuple(KeyDigest(name, "", weight) for name, weight in (weights or {}).items())
        config = ServeConfig(scheduler=SchedulerConfig(**scheduler), cache=CacheConfig(), keys=keys)  # type: ignore[arg-type]
        executor = FastOracle(num_blocks=num_blocks, block_size=16, max_model_len=4096, max_num_seqs=256)
        self.executor = executor
        self.context_seconds = context_seconds  # of a step, for each token of context
        self.engine = EngineCore(executor, config)
        self.now = 0.0
        self.ttft: dict[str, list[float]] = defaultdict(list)
        self.ttft_steps: dict[str, list[int]] = defaultdict(list)
        self.served: dict[str, int] = defaultdict(int)
        self.ended: dict[str, int] = defaultdict(int)
        self.max_preemptions = 0
        self.num_computed = 0
        self.step_tokens: list[int] = []
        self._streams = streams
        self._due = [stream.start for stream in streams]
        self._left = [stream.count for stream in streams]
        self._sent: dict[str, tuple[int, float, int]] = {}
        self._number = 0

    def run(self, seconds: float, until_idle: bool = False) -> None:
        """Until the clock has moved so far, or nothing is left to do."""
        end = self.now + seconds
        while self.now < end:
            self._send_due()
            self.engine.scheduler.expire(self.now)
            self.engine.submit()
            if self.engine.scheduler.num_in_flight == 0:
                due = [at for at in self._due if at > self.now]
                if not due or until_idle:
                    return
                self.now = min(due)
                continue
            plan = self.executor._queue[0]
            tokens = sum(plan.num_new_tokens)
            self.step_tokens.append(tokens)
            self.num_computed += tokens
            context = sum(len(s.token_ids) for s in self.engine.scheduler.running if s.row in plan.rows)
            self.now += STEP_SECONDS + TOKEN_SECONDS * tokens + self.context_seconds * context
            live = self.engine.scheduler.requests.values()
            self.max_preemptions = max([self.max_preemptions, *(r.sequences[0].num_preemptions for r in live)])
            step = self.engine.collect(None)
            assert step is not None
            for output in step.outputs:
                self._take(output)

    def _send_due(self) -> None:
        for i, stream in enumerate(self._streams):
            if self._due[i] <= self.now and self._left[i]:
                self._left[i] -= 1
                self._due[i] = float("inf")
                self._number += 1
                name = f"{stream.tenant}-{self._number}"
                prompt = [(self._number * 31 + k * 7) % 50 for k in range(stream.prompt_len)]
                prompt[:3] = [self._number % 50, self._number // 50 % 50, self._number // 2500 % 50]
                message = make_message(name, prompt, tenant=stream.tenant, max_tokens=stream.max_tokens)
                self.engine.add(message, self.now)
                self._sent[name] = (i, self.now, len(self.step_tokens))

    def _take(self, output: TokenOutput) -> None:
        i, sent, step = self._sent[output.request_id]
        tenant = self._streams[i].tenant
        if output.index == 0 and output.token_ids:
            self.ttft[tenant].append(self.now - sent)
            self.ttft_steps[tenant].append(len(self.step_tokens) - step)
        self.served[tenant] += len(output.token_ids)
        if output.finish_reason is not None:
            self.ended[tenant] += 1
            self._due[i] = self.now + self._streams[i].pause


def p99(values: list[float]) -> float:
    """The value that 99 of 100 do not exceed."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


def jain(values: list[float]) -> float:
    """Jain's index of fairness: 1 = all equal, 1/n = one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
