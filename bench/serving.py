"""Load on any server with OpenAI's completions API: `python -m bench.serving --base-url http://127.0.0.1:8000`.

Requests arrive by a gamma process (`--burstiness 1` is Poisson) or all at once, at most `--max-concurrency` at a time.
The metrics and the keys of the result are those of `vllm bench serve --save-result`. Ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import report, workloads
from bench.http_stream import RequestError, Target
from bench.server import started_server

DEFAULT_VOCABULARY = 600  # ids that every model has, the demo model too


@dataclass(slots=True)
class Measured:
    """One request: its times in seconds, and how it ended."""

    input_len: int
    output_len: int = 0  # tokens, from the server's usage
    began: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)  # one per event with text after the first
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive."""

    request_rate: float  # per second; inf = all at once
    burstiness: float  # shape of the gamma distribution; 1 = Poisson, larger = more even
    max_concurrency: int | None
    temperature: float = 0.0


async def send(target: Target, model: str, item: workloads.Item, load: Load) -> Measured:
    """One streamed completion, measured."""
    measured = Measured(input_len=len(item.prompt_token_ids))
    body = {
        "model": model,
        "prompt": item.prompt_token_ids,
        "max_tokens": item.max_tokens,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    measured.began = last = time.perf_counter()
    try:
        async for event in target.events("/v1/completions", body):
            now = time.perf_counter()
            if event.get("usage"):
                measured.output_len = event["usage"]["completion_tokens"]
            if not event.get("choices"):
                continue
            if measured.ttft == 0.0:
                measured.ttft = now - measured.began
            else:
                measured.itls.append(now - last)
            last = now
        measured.latency = last - measured.began
    except RequestError as error:
        measured.error = str(error)
    return measured


async def run(target: Target, model: str, items: Sequence[workloads.Item], load: Load, seed: int = 0) -> list[Measured]:
    """Send all items as the load says and wait for every answer; in the order of the items."""
    gate = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()

    async def one(item: workloads.Item) -> Measured:
        async with gate:
            return await send(target, model, item, load)

    draw = random.Random(seed)
    tasks = []
    due = time.perf_counter()
    for item in items:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(item)))
        if load.request_rate != float("inf"):
            due += draw.gammavariate(load.burstiness, 1.0 / (load.request_rate * load.burstiness))
    return await asyncio.gather(*tasks)


def summary(results: Sequence[Measured], duration: float, goodput: dict[str, float]) -> dict[str, Any]:
    """The figures. `goodput`: limits in ms by metric (ttft, tpot, e2el) that a request must meet to count."""
    good = [result for result in results if not result.error]
    num_input, num_output = sum(r.input_len for r in good), sum(r.output_len for r in good)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    if goodput:
        figures["request_goodput"] = sum(meets(result, goodput) for result in good) / duration
    figures |= report.spread("ttft", [1000 * r.ttft for r in good])
    figures |= report.spread("tpot", [1000 * r.tpot for r in good if r.output_len > 1])
    figures |= report.spread("itl", [1000 * itl for r in good for itl in r.itls])
    figures |= report.spread("e2el", [1000 * r.latency for r in good])
    return figures


def meets(result: Measured, goodput: dict[str, float]) -> bool:
    """Whether one request kept every limit."""
    values = {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}
    return all(1000 * values[name] <= limit for name, limit in goodput.items())


def details(results: Sequence[Measured]) -> dict[str, Any]:
    """Every request's numbers, under vLLM's keys."""
    return {
        "input_lens": [r.input_len for r in results],
        "output_lens": [r.output_len for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itls for r in results],
        "errors": [r.error for r in results],
    }


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200` and so on, in milliseconds. Raises ValueError."""
    limits = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"--goodput knows ttft, tpot and e2el, not '{name}'")
        limits[name] = float(limit)
    return limits


def first_model(target: Target) -> str:
    """The first model that the server offers."""
    request = urllib.request.Request(f"{target.base_url}/v1/models")
    if target.api_key:
        request.add_header("Authorization", f"Bearer {target.api_key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--start-server", action="store_true", help="serve --model for the run, on a free port")
    parser.add_argument("--api-key")
    parser.add_argument("--model", help="default: the first that the server offers")
    parser.add_argument("--workload", default="shared", help="shared, fixed:IN:OUT or prefix:PREFIX:OWN:OUT")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCABULARY)
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="requests per second")
    parser.add_argument("--burstiness", type=float, default=1.0)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="e.g. ttft:200 tpot:50 e2el:9000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON file for the result")
    return parser.parse_args()


@contextlib.contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[Target]:
    if not arguments.start_server:
        yield Target(arguments.base_url.rstrip("/").removesuffix("/v1"), arguments.api_key)
        return
    with started_server(arguments.model or "demo") as running:
        yield Target(running.base_url)


def main() -> None:
    """The command line."""
    arguments = _arguments()
    goodput = parse_goodput(arguments.goodput)
    load = Load(arguments.request_rate, arguments.burstiness, arguments.max_concurrency, arguments.temperature)
    items = workloads.parse(arguments.workload, arguments.vocab_size, arguments.num_prompts)
    with _target(arguments) as target:
        model = arguments.model or first_model(target)
        warm_up = asyncio.run(send(target, model, workloads.Item([1, 2, 3], 4), load))
        if warm_up.error:
            raise SystemExit(f"the server does not answer as it should: {warm_up.error}")
        began = time.perf_counter()
        results = asyncio.run(run(target, model, items, load, arguments.seed))
        duration = time.perf_counter() - began
    settings = {
        "kind": "serving",
        "endpoint_type": "openai",
        "model_id": model,
        "workload": arguments.workload,
        "num_prompts": len(items),
        "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    report.write({**settings, **summary(results, duration, goodput), **details(results)}, arguments.output)
    if any(result.error for result in results):
        raise SystemExit(f"some requests failed, the first with: {next(r.error for r in results if r.error)}")


if __name__ == "__main__":
    main()
