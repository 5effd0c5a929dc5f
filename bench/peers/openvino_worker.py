"""Runs in OpenVINO's environment and imports nothing of ours: OpenVINO GenAI has no server, so this is its loop.

`python openvino_worker.py MODEL SETTINGS`: a line of JSON when the model is loaded, then for every line of JSON on
standard input (`items`: pairs of prompt ids and tokens to make; `max_concurrency`) a line with each request's times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import numpy
import openvino
import openvino_genai


class Request:
    """One request in the pipeline, and the times of its tokens."""

    def __init__(self, pipeline: Any, number: int, prompt: list[int], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self.began = time.perf_counter()
        tensor = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self.handle = pipeline.add_request(number, tensor, config)
        self.times: list[float] = []

    def take(self, now: float) -> bool:
        """Note the tokens that the last step has made; whether it was the last one's."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.times += [now] * len(output.generated_ids)
        return bool(self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING)

    def measured(self) -> dict[str, Any]:
        """Seconds, as `bench.serving.Measured` has them."""
        if not self.times:
            return {"error": f"no token: {self.handle.get_status()}"}
        return {
            "output_len": len(self.times),
            "began": self.began,
            "ttft": self.times[0] - self.began,
            "latency": self.times[-1] - self.began,
            "itls": [late - early for early, late in zip(self.times, self.times[1:], strict=False)],
        }


def run(pipeline: Any, items: list[tuple[list[int], int]], max_concurrency: int, first_number: int) -> list[Any]:
    """All requests, at most so many in the pipeline; the results in the order of the items."""
    requests: list[Request] = []
    active: list[Request] = []
    while active or len(requests) < len(items):
        while len(active) < max_concurrency and len(requests) < len(items):
            number = len(requests)
            requests.append(Request(pipeline, first_number + number, *items[number]))
            active.append(requests[-1])
        pipeline.step()
        now = time.perf_counter()
        active = [request for request in active if not request.take(now)]
    return [request.measured() for request in requests]


def load(model: str, settings: dict[str, Any]) -> Any:
    """The pipeline with continuous batching and prefix cache."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = settings["num_kv_blocks"]
    scheduler.enable_prefix_caching = True
    # where the processor multiplies no bf16 numbers, it refuses keys and values of them
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bf16 else "f32"
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, **settings["properties"]}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def answer(pipeline: Any, lines: TextIO, out: TextIO) -> None:
    """Until standard input ends."""
    served = 0
    for line in lines:
        job = json.loads(line)
        results = run(pipeline, job["items"], job["max_concurrency"], served)
        served += len(results)
        print(json.dumps(results), file=out, flush=True)


def main() -> None:
    """The command line."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print is no answer
    pipeline = load(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=out, flush=True)
    answer(pipeline, sys.stdin, out)


if __name__ == "__main__":
    main()
