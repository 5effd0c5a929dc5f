"""What quantising costs in quality: `python -m bench.quantization [--model FOLDER] [--layer-model FOLDER]`.

The demo model reads held-out answers of its own corpus, with quantised weights or a quantised KV cache. Perplexity is
over the assistant's tokens; agreement is how often the most probable token is that of the full weights in fp32. With
`--layer-model` (a folder that `python -m bench.make_checkpoint qwen3-0.6b FOLDER` made) also the relative error of each
kind of linear layer against fp32, on random activations.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from bench import report
from bench.demo_model.corpus import KINDS, held_out
from bench.demo_model.data import Encoded, encode
from bench.demo_model.tokenizer import render
from kernels.cpu_backend import CpuBackend
from kernels.linear.schemes import INTEGER_SCHEMES
from novainfer import LLM, SamplingParams
from novainfer.checkpoint import resolve_checkpoint

WAYS = tuple(
    (dtype, *way)
    for dtype in ("float32", "bfloat16")
    for way in (*((scheme, "auto") for scheme in ("none", *INTEGER_SCHEMES)), ("none", "int8"), ("int8", "int8"))
)  # type, weights, KV cache
_ROWS = 64


def read_answers(count: int) -> list[Encoded]:
    """Held-out conversations of the demo model's corpus, so many of each kind."""
    tokenizer = Tokenizer.from_file(str(resolve_checkpoint("demo", revision=None) / "tokenizer.json"))
    return [item for kind in KINDS for item in encode(tokenizer, [render(c) for c in held_out(kind, count)])]


def score(model: str, answers: list[Encoded], way: tuple[str, str, str]) -> tuple[list[float], list[int], str]:
    """Log-probability of each token that the assistant says, the most probable token there, and the mode."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    dtype, quantization, kv_cache_dtype = way
    with LLM(model, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype, device="cpu") as llm:
        results = llm.generate([item.ids.tolist() for item in answers], params, use_tqdm=False)
        mode = llm.mode
    logprobs, best = [], []
    for item, result in zip(answers, results, strict=True):
        for place in item.counts.nonzero()[0].tolist():
            entry = result["prompt_logprobs"][place]
            logprobs.append(entry["logprob"])
            best.append(entry["top"][0]["token_id"])
    return logprobs, best, mode


def compare_ways(model: str, count: int) -> Iterator[dict[str, Any]]:
    """Perplexity and agreement of each way to hold weights and KV; the first is what the others are compared with."""
    answers = read_answers(count)
    expected: list[int] = []
    for way in WAYS:
        logprobs, best, mode = score(model, answers, way)
        expected = expected or best
        same = sum(a == b for a, b in zip(best, expected, strict=True))
        yield {
            "mode": mode,
            "tokens": len(best),
            "perplexity": round(math.exp(-sum(logprobs) / len(logprobs)), 5),
            "agreement": round(same / len(best), 5),
        }


def layer_errors(folder: Path) -> Iterator[dict[str, Any]]:
    """Relative error (Frobenius norm) of the results of layer 0 and of the embedding as a vocabulary projection."""
    backend = CpuBackend()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            view = file.get_slice(name)
            if len(view.get_shape()) != 2 or ("layers." in name and ".layers.0." not in name):
                continue
            weight = file.get_tensor(name)
            x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
            exact = x.float() @ weight.float().T
            row: dict[str, Any] = {"layer": name, "shape": list(weight.shape)}
            for scheme in INTEGER_SCHEMES.values():
                actual = backend.pack_linear(weight, None, scheme)(x, torch.float32)
                row[scheme.name] = round(float((actual - exact).norm() / exact.norm()), 5)
            yield row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantization", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a checkpoint with the demo model's tokens")
    parser.add_argument("--count", type=int, default=3, help="conversations of each kind")
    parser.add_argument("--layer-model", type=Path)
    parser.add_argument("--output", help="JSON file for the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"kind": "quantization", "ways": [], "layers": []}
    for way in compare_ways(arguments.model, arguments.count):
        print(way, flush=True)
        result["ways"].append(way)
    for row in layer_errors(arguments.layer_model) if arguments.layer_model else ():
        print(row, flush=True)
        result["layers"].append(row)
    report.write(result, arguments.output)


if __name__ == "__main__":
    main()
