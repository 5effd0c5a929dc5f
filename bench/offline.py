"""Throughput of the offline `LLM`: `python -m bench.offline [--model DIR] [--workload shared]`. Ends by itself."""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench import report, workloads
from novainfer import LLM, SamplingParams
from novainfer.entrypoints.options import OPTIONS, parse_text


def run(model: str, workload: str, num_seqs: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Generate everything at once; seconds are those of `generate` alone, after one warm-up request."""
    with LLM(model, **options) as llm:
        items = workloads.parse(workload, llm.tokenizer.vocab_size, num_seqs)
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=item.max_tokens) for item in items]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        began = time.perf_counter()
        results = llm.generate([item.prompt_token_ids for item in items], params)
        seconds = time.perf_counter() - began
    produced = [len(result["token_ids"]) for result in results]
    if produced != [item.max_tokens for item in items]:
        raise SystemExit("some request did not get all of its tokens: this run does not count")
    num_input = sum(len(item.prompt_token_ids) for item in items)
    return {
        "kind": "offline",
        "model_id": model,
        "workload": workload,
        "options": {key: str(value) for key, value in options.items()},
        "num_prompts": len(items),
        "duration": seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": sum(produced),
        "request_throughput": len(items) / seconds,
        "output_throughput": sum(produced) / seconds,
        "total_token_throughput": (num_input + sum(produced)) / seconds,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.offline", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workload", default="shared", help="shared, fixed:IN:OUT or prefix:PREFIX:OWN:OUT")
    parser.add_argument("--num-seqs", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the LLM")
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    options = {}
    for assignment in arguments.set:
        name, _, value = assignment.partition("=")
        name = name.replace("-", "_")
        if name not in OPTIONS:
            parser.error(f"--set: unknown option '{name}'")
        options[name] = parse_text(OPTIONS[name], value)
    report.write(run(arguments.model, arguments.workload, arguments.num_seqs, options), arguments.output)


if __name__ == "__main__":
    main()
