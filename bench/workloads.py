"""Seeded workloads, the same for us and for every other server."""

from __future__ import annotations

import random
from dataclasses import dataclass

_FIELD_VOCABULARY = 10_000  # ids are drawn below this and then folded into the model's vocabulary


@dataclass(frozen=True, slots=True)
class Item:
    """One request: a prompt of token ids, and how many tokens to generate (the end of text is ignored)."""

    prompt_token_ids: list[int]
    max_tokens: int


def shared(vocab_size: int, *, num_seqs: int = 256, longest: int = 1024, seed: int = 0) -> list[Item]:
    """The workload that nano-vllm and mini-sglang use: inputs and outputs of 100 to 1024 tokens, drawn uniformly.

    The numbers are drawn in their order (all prompts, then all output lengths), so lengths are equal to theirs.
    """
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, _FIELD_VOCABULARY) % vocab_size for _ in range(draw.randint(100, longest))]
        for _ in range(num_seqs)
    ]
    return [Item(prompt, draw.randint(100, longest)) for prompt in prompts]


def fixed(vocab_size: int, *, num_seqs: int, num_input: int, num_output: int, seed: int = 0) -> list[Item]:
    """Every request the same size, every prompt different."""
    draw = random.Random(seed)
    return [Item([draw.randrange(vocab_size) for _ in range(num_input)], num_output) for _ in range(num_seqs)]


def shared_prefix(
    vocab_size: int, *, num_seqs: int, num_prefix: int, num_own: int, num_output: int, seed: int = 0
) -> list[Item]:
    """Prompts that begin with the same `num_prefix` tokens, as with a long system message."""
    draw = random.Random(seed)
    prefix = [draw.randrange(vocab_size) for _ in range(num_prefix)]
    return [Item(prefix + [draw.randrange(vocab_size) for _ in range(num_own)], num_output) for _ in range(num_seqs)]


def parse(text: str, vocab_size: int, num_seqs: int | None) -> list[Item]:
    """A workload by name: `shared`, `fixed:INPUT:OUTPUT` or `prefix:PREFIX:OWN:OUTPUT` (lengths in tokens).

    Raises ValueError for anything else.
    """
    name, *numbers = text.split(":")
    sizes = [int(number) for number in numbers]
    if name == "shared" and not sizes:
        return shared(vocab_size, num_seqs=num_seqs or 256)
    if name == "fixed" and len(sizes) == 2:
        return fixed(vocab_size, num_seqs=num_seqs or 64, num_input=sizes[0], num_output=sizes[1])
    if name == "prefix" and len(sizes) == 3:
        prefix, own, output = sizes
        return shared_prefix(vocab_size, num_seqs=num_seqs or 64, num_prefix=prefix, num_own=own, num_output=output)
    raise ValueError(f"'{text}' is not shared, fixed:INPUT:OUTPUT or prefix:PREFIX:OWN:OUTPUT")
