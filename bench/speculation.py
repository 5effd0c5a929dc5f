"""What prompt lookup gains and costs: `python -m bench.speculation [--rounds 5] [--batch 1 4]`. Ends by itself.

Two offline `LLM`s of the same model, one with and one without, take the same requests in turns. `copies` ask for a
story that the conversation has already told, so that the answer stands in the prompt; `fresh` ask for stories that it
has not. Both sides must say the same tokens. The ratio is of the medians of time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from bench import report
from bench.demo_model.content import Draw
from bench.demo_model.stories import story
from novainfer import LLM, SamplingParams
from novainfer.text.chat_template import ChatTemplate

WAYS = ("none", "prompt-lookup")
NUM_PROMPTS = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=256)


def make_prompts(llm: LLM, *, are_told: bool) -> list[list[int]]:
    """Questions for stories; `are_told`: after the same question and its answer."""
    draw, template = Draw(random.Random(0), "test"), ChatTemplate.of(llm.tokenizer)
    prompts = []
    for _ in range(NUM_PROMPTS):
        question, answer = story(draw).messages
        text = template.render([question, answer, question] if are_told else [question])
        prompts.append(llm.tokenizer.encode(text, add_special_tokens=False))
    return prompts


def run(llm: LLM, prompts: list[list[int]], batch: int) -> tuple[float, list[list[int]]]:
    """Seconds for all, `batch` at a time, and the tokens."""
    answers, began = [], time.perf_counter()
    for first in range(0, NUM_PROMPTS, batch):
        results = llm.generate(prompts[first : first + batch], PARAMS, use_tqdm=False)
        answers += [result["token_ids"] for result in results]
    return time.perf_counter() - began, answers


def compare(llms: dict[str, LLM], prompts: list[list[int]], batch: int, rounds: int) -> dict[str, Any]:
    """All rounds; the first one warms up and does not count. Raises SystemExit if the tokens are not the same."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_tokens = 0
    for number in range(rounds + 1):
        said = {}
        for way in WAYS if number % 2 else WAYS[::-1]:
            took, said[way] = run(llms[way], prompts, batch)
            if number:
                seconds[way].append(took)
        if said[WAYS[0]] != said[WAYS[1]]:
            raise SystemExit("prompt lookup changed the tokens")
        num_tokens = sum(map(len, said[WAYS[0]]))
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {
        "batch": batch,
        "tokens": num_tokens,
        "tokens_per_second": {way: num_tokens / median for way, median in medians.items()},
        "seconds": seconds,
        "ratio": medians["none"] / medians["prompt-lookup"],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    results = []
    # The same prompts come again and again: with a prefix cache only decodes would be left.
    with (
        LLM(arguments.model, speculation="none", enable_prefix_caching=False) as plain,
        LLM(arguments.model, speculation="prompt-lookup", enable_prefix_caching=False) as looking,
    ):
        for name, are_told in (("copies", True), ("fresh", False)):
            prompts = make_prompts(plain, are_told=are_told)
            for batch in arguments.batch:
                entry = compare({"none": plain, "prompt-lookup": looking}, prompts, batch, arguments.rounds)
                results.append({"workload": name, **entry})
                print(f"{name}, {batch} at a time: {entry['ratio']:.3f}x", flush=True)
    report.write({"kind": "speculation", "model_id": arguments.model, "results": results}, arguments.output)


if __name__ == "__main__":
    main()
