"""What others have for the kernels that `bench.gpu` times: torch's flex_attention and sort, FlashInfer, transformers.

Each is in the table where it can be had, and is missing with a reason where not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import SamplingTensors
from kernels.triton_backend import TritonBackend

Call = Callable[[], object]
Prompts = list[list[int]]

BLOCK = 16
_MOST_SHAPES = 64
_TEMPERATURE = 0.8
# What rows ask of the sampler: top_k (0: all) and top_p. Top-p alone is what most clients send, and the dear way.
FILTERS = {"temperature": (0, 1.0), "top-k and top-p": (50, 0.9), "top-p": (0, 0.95)}


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Call:
    """query [B, H, Q, D], key and value [B, Hkv, L, D]: contiguous, without a page table."""
    return partial(F.scaled_dot_product_attention, query, key, value, is_causal=is_causal, enable_gqa=True)


def flex(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Call:
    """The same by flex_attention, compiled where there is a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Any = _compiled_flex() if query.is_cuda else flex_attention
    mask = None
    if is_causal:
        offset = key.shape[2] - query.shape[2]
        mask = create_block_mask(
            lambda batch, head, row, column: row + offset >= column,
            *(None, None, query.shape[2], key.shape[2]),
            device=str(query.device),
        )
    return partial(attend, query, key, value, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Any:
    """For every shape anew; beyond a limit torch would go on without fusing, which is not what is to be measured."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    config: Any = torch._dynamo.config
    config.recompile_limit = _MOST_SHAPES
    return torch.compile(flex_attention, dynamic=False)


def flashinfer_decode(lengths: Sequence[int], heads: int, kv_heads: int, dim: int, device: torch.device) -> Call | None:
    """Paged decode; None where FlashInfer is not installed, or finds no kernel."""
    if importlib.util.find_spec("flashinfer") is None or device.type != "cuda":
        return None
    flashinfer: Any = importlib.import_module("flashinfer")
    needed = torch.tensor([-(-length // BLOCK) for length in lengths])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), needed.cumsum(0)]).int()
    blocks = int(starts[-1])
    last = torch.tensor([(length - 1) % BLOCK + 1 for length in lengths], dtype=torch.int32)
    caches = tuple(torch.randn(blocks, kv_heads, BLOCK, dim, device=device).bfloat16() for _ in range(2))
    query = torch.randn(len(lengths), heads, dim, device=device).bfloat16()
    try:
        space = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        indices = torch.randperm(blocks, dtype=torch.int32)
        wrapper.plan(
            *(part.to(device) for part in (starts, indices, last)),
            *(heads, kv_heads, dim, BLOCK),
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        wrapper.run(query, caches)
    except Exception as error:  # no compiler for its kernels, another interface: whatever it is, it is not ours
        print(f"FlashInfer is left out: {type(error).__name__}: {error}")
        return None
    return partial(wrapper.run, query, caches)


def sampler_calls(rows: int, vocab: int, device: torch.device, filters: str) -> dict[str, list[Call]]:
    """Sampling from logits [rows, vocab] with one of `FILTERS`: ours as a step calls it, which finds rows that
    are not finite as well, and torch's, by a sort where there is a filter.
    """
    top_k, top_p = FILTERS[filters]
    logits = torch.randn(rows, vocab, device=device) * 3

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    params = SamplingTensors(
        temperature=full(_TEMPERATURE, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32),
        min_p=full(0.0, torch.float32),
        seed=torch.arange(rows, device=device),
        choice=full(0, torch.int32),
        index=torch.arange(rows, device=device),
    )
    is_filtered = top_k > 0 or top_p < 1.0
    theirs = partial(_sample_by_sort, logits, _TEMPERATURE, top_k or vocab, top_p)
    return {
        "novainfer": [partial(TritonBackend(device).choose, logits, params)],
        "torch sort" if is_filtered else "torch softmax": [theirs],
    }


def _sample_by_sort(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """As servers that sort do it, which need not where nothing is filtered: [rows] int64."""
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_k < logits.shape[1] or top_p < 1.0:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        ordered[:, top_k:] = 0.0
        ordered[ordered.cumsum(-1) - ordered > top_p * ordered.sum(-1, keepdim=True)] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter_(1, ids, ordered)
    return torch.argmax(probabilities / torch.empty_like(probabilities).exponential_(), dim=-1)


def transformers_job(
    folder: str, prompts: Prompts, others: Prompts, num_output: int, device: torch.device
) -> tuple[float, str]:
    """Seconds of a greedy job by transformers' continuous batching, and the name of the attention that it took.

    Its manager, cache and graphs are there before, as ours are: made for a job with other prompts of the same shape.
    Raises whatever it raises where it cannot do it.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    make_config: Any = GenerationConfig
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device).eval()
    config = make_config(max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    limits: dict[str, Any] = {}
    if device.type == "cpu":  # a rehearsal: its cache would take nine tenths of what is free, beside other tests
        from transformers import ContinuousBatchingConfig

        make_limits: Any = ContinuousBatchingConfig
        limits["continuous_batching_config"] = make_limits(max_memory_percent=0.02)
    model.generate_batch(inputs=others, generation_config=config, progress_bar=False, persistent_manager=True, **limits)
    with model.continuous_batching_context_manager(generation_config=config, timeout=5, **limits) as manager:
        attention = str(model.config._attn_implementation)  # the manager may have chosen another one
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=num_output)
        made: list[int] = []
        while len(made) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                break
            if result is not None and result.error is not None:
                raise RuntimeError(str(result.error))
            if result is not None and result.is_finished():
                made.append(len(result.generated_tokens))
        seconds = time.perf_counter() - began
    if made != [num_output] * len(prompts):
        raise RuntimeError(f"{sum(made)} tokens instead of {num_output} for each of {len(prompts)}")
    return seconds, attention


def main() -> None:
    """A job by transformers: `python -m bench.gpu_peers FOLDER --device cuda --sequences 64 ...`, and its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_peers", description=main.__doc__)
    parser.add_argument("folder")
    parser.add_argument("--device", type=torch.device, required=True)
    for name in ("--sequences", "--num-input", "--num-output", "--vocab"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing is looked for elsewhere
    rng = random.Random(0)
    prompts, others = (
        [[rng.randrange(given.vocab) for _ in range(given.num_input)] for _ in range(given.sequences)] for _ in range(2)
    )
    seconds, attention = transformers_job(given.folder, prompts, others, given.num_output, given.device)
    tokens = given.sequences * given.num_output
    print(json.dumps({"seconds": seconds, "tokens_per_second": tokens / seconds, "attention": attention}))


if __name__ == "__main__":
    main()
