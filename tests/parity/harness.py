"""Greedy decoding two ways: by transformers' `generate`, and by our model over a real paged cache with ragged steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.backend import AttentionMetadata, KernelBackend, select_backend
from novainfer.config import ModelConfig
from tests.parity.builders import auto_class
from workers.checkpoint import read_json
from workers.models.base import CausalLM, ForwardBatch, KeptTokens
from workers.models.loader import load_model
from workers.tensor_parallel import TensorParallel

BLOCK_SIZE = 16
NUM_TOKENS = 64
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # that the list of families is tested on


@dataclass(frozen=True)
class Generation:
    """Per prompt: the new token ids and the log-probability of each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


@contextmanager
def one_thread() -> Iterator[None]:
    """The models are far too small for more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ragged_prompts(count: int = 8, vocab_size: int = 256, seed: int = 0, shortest: int = 1) -> list[list[int]]:
    """Prompts of very different lengths; some cross blocks, windows and chunks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [shortest + length for length in (0, 4, 6, 16, 22, 32, 39, 52)]
    return [torch.randint(vocab_size, (lengths[i % 8],), generator=generator).tolist() for i in range(count)]


def load(
    folder: Path, tp: TensorParallel | None = None, device: torch.device = CPU, **config: object
) -> tuple[CausalLM, KernelBackend]:
    """The model and the device's own kernels."""
    kernels = select_backend(device)
    model_config = ModelConfig(model=str(folder), **config)  # type: ignore[arg-type]
    return load_model(model_config, tp=tp or TensorParallel.single(), kernels=kernels, device=device), kernels


def transformers_greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> Generation:
    """transformers' own answer: one left-padded batch, eager attention, never stopping early."""
    kind = read_json(folder, "config.json")["model_type"]
    model = auto_class(kind).from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with one_thread(), torch.inference_mode():
        result = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = result.sequences[:, longest:]
    logits = torch.stack(result.logits, dim=1).float()  # [prompts, num_tokens, vocab]
    logprobs = logits.log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    return Generation(tokens.tolist(), logprobs.tolist())


class PagedSession:
    """Drives a model as a scheduler would: decodes first, then prefill chunks, under one token budget."""

    def __init__(
        self,
        model: CausalLM,
        kernels: KernelBackend,
        prompts: list[list[int]],
        num_tokens: int,
        cache_dtype: torch.dtype | None = None,
        keeps_all: bool = True,
        device: torch.device = CPU,
    ) -> None:
        """keeps_all: the model gives the hidden states of all tokens, not of those alone that are sampled after.

        device: the model's.
        """
        spec = model.spec
        self._model = model
        self._keeps_all, self._device = keeps_all, device
        self._tokens = [list(prompt) for prompt in prompts]
        self._prompt_lens = [len(prompt) for prompt in prompts]
        self._targets = [len(prompt) + num_tokens for prompt in prompts]
        self._computed = [0] * len(prompts)
        self._logprobs: list[list[float]] = [[] for _ in prompts]
        blocks_each = max(-(-target // BLOCK_SIZE) for target in self._targets)
        num_blocks = blocks_each * len(prompts)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self._block_table = shuffled.view(len(prompts), blocks_each)
        sizes = (num_blocks, BLOCK_SIZE, model.num_local_kv_heads, spec.head_dim)
        layers = range(spec.num_layers)
        self._caches = [kernels.allocate_kv_cache(*sizes, spec.dtype, device, cache_dtype) for _ in layers]

    def run(self, budget: int) -> Generation:
        """Decode greedily until every sequence has its tokens; each step computes at most `budget` tokens."""
        with one_thread():
            while plan := self._plan(budget):
                self._step(plan)
        starts = zip(self._tokens, self._prompt_lens, strict=True)
        return Generation([tokens[start:] for tokens, start in starts], self._logprobs)

    def _plan(self, budget: int) -> list[tuple[int, int]]:
        """(sequence, tokens to compute), decodes first."""
        pending = [
            (i, len(self._tokens[i]) - self._computed[i])
            for i in range(len(self._tokens))
            if len(self._tokens[i]) < self._targets[i]
        ]
        plan: list[tuple[int, int]] = []
        for i, count in sorted(pending, key=lambda entry: entry[1]):
            count = min(count, budget)
            if count:
                plan.append((i, count))
            budget -= count
        return sorted(plan, key=lambda entry: entry[1] > 1)

    def _step(self, plan: list[tuple[int, int]]) -> None:
        rows = [i for i, _ in plan]
        counts = [count for _, count in plan]
        spans = [range(self._computed[i], self._computed[i] + count) for i, count in plan]
        input_ids = torch.tensor([self._tokens[i][p] for i, span in zip(rows, spans, strict=True) for p in span])
        positions = torch.tensor([p for span in spans for p in span])
        table = self._block_table[rows]
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        slots = table[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        seq_lens = [span.stop for span in spans]
        metadata = AttentionMetadata(
            query_start_loc=ends.to(self._device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self._device),
            block_table=table.to(self._device),
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
        )
        samples = [row for row, (i, seq_len) in enumerate(zip(rows, seq_lens, strict=True)) if self._is_all(i, seq_len)]
        wanted = (ends[1:].long()[samples] - 1).to(self._device)
        input_ids, positions, slots = (part.to(self._device) for part in (input_ids, positions, slots))
        kept = None if self._keeps_all else KeptTokens(wanted, _last_tokens(metadata, samples))
        with torch.inference_mode():
            hidden = self._model.forward(input_ids, positions, ForwardBatch(metadata, slots, kept), self._caches)
            assert len(hidden) == (len(input_ids) if kept is None else len(samples))
            logits = self._model.logits(hidden[wanted] if kept is None else hidden) if samples else None
        for i, seq_len in zip(rows, seq_lens, strict=True):
            self._computed[i] = seq_len
        if logits is not None:
            self._sample([rows[row] for row in samples], logits.cpu())

    def _is_all(self, i: int, seq_len: int) -> bool:
        return seq_len == len(self._tokens[i])

    def _sample(self, sequences: list[int], logits: Tensor) -> None:
        logprobs = logits.log_softmax(-1)
        for row, i in enumerate(sequences):
            token = int(logits[row].argmax())
            self._tokens[i].append(token)
            self._logprobs[i].append(float(logprobs[row, token]))


def _last_tokens(metadata: AttentionMetadata, sequences: list[int]) -> AttentionMetadata:
    seq_lens = metadata.seq_lens[sequences]
    return AttentionMetadata(
        query_start_loc=torch.arange(len(sequences) + 1, dtype=torch.int32, device=seq_lens.device),
        seq_lens=seq_lens,
        block_table=metadata.block_table[sequences],
        num_decodes=len(sequences),
        max_query_len=1,
        max_seq_len=max(seq_lens.tolist(), default=0),
    )


def paged_greedy(
    model: CausalLM,
    kernels: KernelBackend,
    prompts: list[list[int]],
    num_tokens: int,
    budget: int = 24,
    cache_dtype: torch.dtype | None = None,
    *,
    keeps_all: bool = True,
    device: torch.device = CPU,
) -> Generation:
    """Our answer."""
    return PagedSession(model, kernels, prompts, num_tokens, cache_dtype, keeps_all, device).run(budget)


def largest_difference(ours: Generation, theirs: Generation) -> float:
    """Between log-probabilities of the same tokens."""
    return max(
        abs(a - b)
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
