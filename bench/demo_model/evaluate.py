"""Score a checkpoint on the held-out part: `python -m bench.demo_model.evaluate --model DIR`.

An example is right when greedy decoding gives every assistant turn exactly, token by token. That is so if and
only if each expected token is the most likely one after those before it, so one forward pass decides it. The
same text in other tokens counts as wrong, so the accuracy is a lower bound.
The margin of an answer is the smallest distance between its best and its second-best logit: small margins are
where two correct implementations may pick different tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from bench.demo_model.corpus import KINDS, held_out
from bench.demo_model.data import Encoded, encode
from bench.demo_model.tokenizer import render

EVALUATED = (*KINDS, "multi_turn")
_ROWS = 16


@dataclass(frozen=True)
class Verdict:
    """Whether an example came out exactly, and its smallest logit margin."""

    right: bool
    margin: float


@torch.no_grad()
def judge(model: Qwen3ForCausalLM, examples: list[Encoded]) -> list[Verdict]:
    """Verdicts for encoded conversations, in order."""
    verdicts = []
    for first in range(0, len(examples), _ROWS):
        rows = examples[first : first + _ROWS]
        ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.from_numpy(
                row.ids
            )  # padding on the right is never seen: attention is causal
        logits = model(input_ids=ids, use_cache=False).logits
        for i, row in enumerate(rows):
            places = torch.from_numpy(np.flatnonzero(row.counts))
            best = logits[i, places - 1].topk(2)
            right = bool((best.indices[:, 0] == ids[i, places]).all())
            verdicts.append(Verdict(right, float((best.values[:, 0] - best.values[:, 1]).min())))
    return verdicts


def evaluate(directory: Path, count: int = 200, show_errors: int = 0) -> dict[str, Any]:
    """Accuracy and margins per kind, computed in fp32 with the bfloat16 weights in `directory`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    accuracy, numbers, median, low = {}, {}, {}, {}
    for kind in EVALUATED:
        conversations = held_out(kind, count)
        verdicts = judge(model, encode(tokenizer, [render(c) for c in conversations]))
        margins = [verdict.margin for verdict in verdicts if verdict.right] or [0.0]
        numbers[kind] = len(verdicts)
        accuracy[kind] = round(sum(verdict.right for verdict in verdicts) / len(verdicts), 4)
        median[kind] = round(float(np.median(margins)), 2)
        low[kind] = round(float(np.quantile(margins, 0.05)), 2)
        wrong = [c for c, verdict in zip(conversations, verdicts, strict=True) if not verdict.right]
        for conversation in wrong[:show_errors]:
            print(f"[{kind}] {[m['content'] or m['tool_calls'] for m in conversation.messages]}")
    total = sum(numbers.values())
    overall = round(sum(accuracy[kind] * numbers[kind] for kind in numbers) / total, 4)
    return {
        "accuracy": accuracy,
        "examples": numbers,
        "median_margin": median,
        "margin_5_percent": low,
        "total": {"accuracy": overall, "examples": total},
    }


def table(score: dict[str, Any]) -> str:
    """The score as a Markdown table."""
    lines = ["| kind | examples | exact | median margin | 5 % margin |", "|---|---:|---:|---:|---:|"]
    for kind, value in score["accuracy"].items():
        count, median, low = (score[key][kind] for key in ("examples", "median_margin", "margin_5_percent"))
        lines.append(f"| {kind} | {count} | {100 * value:.1f} % | {median} | {low} |")
    lines.append(f"| **total** | {score['total']['examples']} | {100 * score['total']['accuracy']:.1f} % | | |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, print the score as JSON and as a table."""
    parser = argparse.ArgumentParser(description="Score the NovaInfer demo model.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--count", type=int, default=200, help="examples per kind")
    parser.add_argument("--show-errors", type=int, default=0, help="wrong examples to print per kind")
    options = parser.parse_args()
    score = evaluate(options.model, options.count, options.show_errors)
    print(json.dumps(score))
    print(table(score))


if __name__ == "__main__":
    main()
