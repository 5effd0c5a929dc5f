"""What the machine itself would allow: how fast its threads read and multiply, and what a step then takes at least.

The rates are of the fastest call of some milliseconds, measured beside every server's turn, because a shared machine
is not always as fast. The least time of a step's layers is the larger of what reading and what multiplying takes, as if
both went on at once, and nothing else took any; the same for the vocabulary projection, which comes after them. So it
is a limit for servers that do not read the projection's weights while the layers multiply, and that read all bits of a
weight. Of the last layer, tokens that nothing is sampled after need keys and values alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import cases
from kernels.cpu_backend import CpuBackend
from kernels.memory import lazy_zeros

_COLD_BYTES, _PIECE_BYTES = 400_000_000, 40_000_000  # of all pieces together, more than any cache holds; of one
_ROWS, _COLUMNS, _DEPTH = 256, 3072, 1024
_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Machine:
    """Of all threads together."""

    bytes_per_second: float  # read from memory
    flops_per_second: float  # bf16 products and fp32 sums, counted as two


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a token costs in a dense decoder with a vocabulary projection; from `config.json`."""

    num_layers: int
    layer_weights: int  # numbers, of all layers
    head_weights: int
    kv_weights: int  # of all layers' projections to keys and values
    kv_numbers: int  # of one token's keys and values
    attention_numbers: int  # heads times their size, over all layers
    num_bytes: int = 2  # of a number

    @classmethod
    def of(cls, config: dict[str, Any]) -> Decoder:
        """Gated MLPs and grouped-query attention."""
        hidden, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
        kv_numbers = layers * 2 * kv_heads * dim
        head_weights = config["vocab_size"] * hidden
        return cls(layers, layers * per_layer, head_weights, kv_numbers * hidden, kv_numbers, layers * heads * dim)

    def step_seconds(self, machine: Machine, rows: Sequence[tuple[int, int]]) -> float:
        """rows: for each sequence its tokens to compute and those it has before; one is sampled of each."""
        tokens, share = sum(new for new, _ in rows), 1 / self.num_layers  # of one layer
        scores = sum(new * before + new * (new + 1) // 2 for new, before in rows)
        last_scores = sum(before + new for new, before in rows)
        read = self.layer_weights + self.kv_numbers * sum(before + new for new, before in rows)
        others = share * (self.layer_weights - self.kv_weights) * (tokens - len(rows))  # that the last layer leaves out
        products = self.layer_weights * tokens - others
        products += 2 * self.attention_numbers * ((1 - share) * scores + share * last_scores)
        layers = self._part_seconds(machine, read, products)
        return layers + self._part_seconds(machine, self.head_weights, self.head_weights * len(rows))

    def _part_seconds(self, machine: Machine, read: float, products: float) -> float:
        return max(self.num_bytes * read / machine.bytes_per_second, 2 * products / machine.flops_per_second)


def limits(decoder: Decoder, machine: Machine) -> dict[str, float]:
    """The least figures of the comparison's cases, by the figures' keys; those without a simple one are left out."""
    prompt, output, found = cases.PROMPT_TOKENS, cases.OUTPUT_TOKENS, {}
    for concurrency in cases.NUM_REQUESTS:
        prefill = decoder.step_seconds(machine, [(prompt, 0)] * concurrency)
        step = decoder.step_seconds(machine, [(1, prompt + output // 2)] * concurrency)
        found[f"c{concurrency}, output", "tok/s"] = concurrency * output / (prefill + (output - 1) * step)
        found[f"c{concurrency}, inter-token p50", "ms"] = 1000 * step
    first = {
        "c1, TTFT p50": (prompt, 0),
        "prompt of 1024, TTFT": (cases.LONG_PROMPT_TOKENS, 0),
        "prefix cold, TTFT": (cases.PREFIX_TOKENS + cases.OWN_TOKENS, 0),
        "prefix warm, TTFT": (cases.OWN_TOKENS, cases.PREFIX_TOKENS),
        cases.CHAT.name: (cases.CHAT_PROMPT_TOKENS, 0),
    }
    for name, row in first.items():
        found[name, "ms"] = 1000 * decoder.step_seconds(machine, [row])
    return {cases.Figure(name, unit).key: value for (name, unit), value in found.items()}


def measure() -> Machine:
    """Now, on all of torch's threads."""
    backend, num_pieces = CpuBackend(), _COLD_BYTES // _PIECE_BYTES
    pieces = lazy_zeros((num_pieces, _PIECE_BYTES // 8), torch.int64).fill_(1)  # in huge pages
    reading = _PIECE_BYTES / fastest([piece.sum for piece in pieces], _SECONDS)
    del pieces
    # Some processors ask for little by themselves: a layer, which hints at what it wants next, reads faster there.
    row, piece = torch.ones(1, _DEPTH), torch.ones(_PIECE_BYTES // (4 * _DEPTH), _DEPTH)
    layers = [partial(backend.pack_linear(piece), row) for _ in range(num_pieces)]
    reading = max(reading, piece.nbytes / fastest(layers, _SECONDS))
    del layers
    x, weight = torch.randn(_ROWS, _DEPTH).bfloat16(), torch.randn(_COLUMNS, _DEPTH).bfloat16()
    packed, transposed = backend.pack_linear(weight), weight.t()
    wide_x, wide = x.float(), transposed.float()  # where bf16 products are none of the processor's
    multiplying = fastest([lambda: packed(x), lambda: x @ transposed, lambda: wide_x @ wide], _SECONDS)
    return Machine(reading, 2 * _ROWS * _COLUMNS * _DEPTH / multiplying)


def fastest(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Seconds of the fastest call while they are called in turn, each at least twice.

    The first time, when what it reads may just have been written, does not count.
    """
    best, began, rounds = float("inf"), time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - began < seconds:
        for call in calls:
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            best = min(best, took) if rounds else best
        rounds += 1
    return best
