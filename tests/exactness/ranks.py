"""One rank and two give the same tokens in float32: `python -m tests.exactness.ranks [--quantization int4]`.

Every case of the matrix runs on both, in company. Sums are taken in another order with two ranks, so log-probabilities
are close (`TOLERANCE`), not equal; the tokens are the same unless two of them are as close as that. Weights that are
quantised are the same ones, too. (Not so with w8a8: where activations are rounded to eight bits, the last bit of a sum
can become a whole step.) Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from novainfer.config import ServeConfig
from novainfer.embedding import numbers_of
from novainfer.engine.core import EngineCore
from novainfer.protocol.messages import Logprobs
from tests.exactness.matrix import Answer, Answers, Circumstance, Runner, make_cases
from workers.local_executor import LocalExecutor
from workers.ray_executor import RayExecutor

TOLERANCE = 1e-4
HOW = Circumstance(max_num_seqs=16, max_num_batched_tokens=64, prefix_caching=True, steps_in_flight=2)


def config_of(num_ranks: int, quantization: str) -> ServeConfig:
    """The demo model in float32."""
    config = HOW.config("demo", "float32", quantization)
    return replace(config, parallel=replace(config.parallel, tensor_parallel_size=num_ranks))


def differences(one: Answers, two: Answers) -> Iterator[str]:
    """A line for each choice that is not the same."""
    for name in one:
        what = _difference(one[name], two[name])
        if what:
            yield f"{name}: {what}"


def _difference(one: Answer, two: Answer) -> str:
    if (one.token_ids, one.finish_reason) != (two.token_ids, two.finish_reason):
        return f"{two.token_ids} {two.finish_reason} with two ranks, {one.token_ids} {one.finish_reason} with one"
    if not _are_near(one.embedding, two.embedding):
        return "its embedding differs"
    if not (_close(one.logprobs, two.logprobs) and _close(one.prompt_logprobs, two.prompt_logprobs)):
        return "its log-probabilities differ"
    return ""


def _close(one: Sequence[Logprobs], two: Sequence[Logprobs]) -> bool:
    return [entry.token_id for entry in one] == [entry.token_id for entry in two] and all(
        abs(a.logprob - b.logprob) < TOLERANCE for a, b in zip(one, two, strict=True)
    )


def _are_near(one: bytes, two: bytes) -> bool:
    a, b = numbers_of(one), numbers_of(two)
    return len(a) == len(b) and all(abs(x - y) < TOLERANCE * max(1.0, abs(x)) for x, y in zip(a, b, strict=True))


def main() -> int:
    """Run the cases on one rank and on two, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    options = parser.parse_args()
    quantization = options.quantization
    runner = Runner("demo", "float32", quantization)
    cases = make_cases(options.cases, runner.vocab_size(), options.seed)
    executors = (LocalExecutor(config_of(1, quantization)), RayExecutor(config_of(2, quantization)))
    try:
        engines = [EngineCore(executor, config_of(1, quantization)) for executor in executors]
        one, two = (runner.drive(engine, cases, HOW, random.Random(0)) for engine in engines)
    finally:
        for executor in executors:
            executor.close()
    found = list(differences(one, two))
    for line in found:
        print(line)
    num_tokens = sum(len(answer.token_ids) for answer in one.values())
    print(f"{len(cases)} cases, {len(one)} choices, {num_tokens} tokens, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
