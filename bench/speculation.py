"""What prompt lookup gains and costs: `python -m bench.speculation [--rounds 5] [--batch 1 4]`. Ends by itself.

Two offline `LLM`s of the same model, one with and one without, take each batch of requests one after the other, so that
both meet the same moments of the machine. `copies` ask for a
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


def run(llms: dict[str, LLM], prompts: list[list[int]], batch: int, number: int) -> tuple[dict[str, float], int]:
    """Seconds for all, `batch` at a time, and how many tokens they are.

    Who is first changes with each batch and with the run's number. Raises SystemExit if the tokens are not the same.
    """
    seconds, num_tokens = dict.fromkeys(WAYS, 0.0), 0
    for turn, first in enumerate(range(0, NUM_PROMPTS, batch), number):
        said = {}
        for way in WAYS if turn % 2 else WAYS[::-1]:
            began = time.perf_counter()
            results = llms[way].generate(prompts[first : first + batch], PARAMS, use_tqdm=False)
            seconds[way] += time.perf_counter() - began
            said[way] = [result["token_ids"] for result in results]
        if said[WAYS[0]] != said[WAYS[1]]:
            raise SystemExit("prompt lookup changed the tokens")
        num_tokens += sum(map(len, said[WAYS[0]]))
    return seconds, num_tokens


def compare(llms: dict[str, LLM], prompts: list[list[int]], batch: int, rounds: int) -> dict[str, Any]:
    """All rounds; the first one warms up and does not count."""
    taken = [run(llms, prompts, batch, number) for number in range(rounds + 1)][1:]
    seconds = {way: [each[way] for each, _ in taken] for way in WAYS}
    num_tokens = taken[0][1]
    medians = {way: statistics.median(all_of) for way, all_of in seconds.items()}
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
