"""The load of the comparison: what every server gets, in this order, drawn from a seed.

Prompts are random token ids and differ from one another, so that a prefix cache helps only where a prefix is meant.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from bench import workloads
from bench.report import percentile
from bench.serving import Measured

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
LONG_PROMPT_TOKENS = 1024
PREFIX_TOKENS, OWN_TOKENS = 512, 32
CHAT_TOKENS = 32
CHAT_PROMPT_TOKENS = CHAT_TOKENS + 14  # with what the template of `bench.make_checkpoint` puts around them
NUM_CHATS = 20
NUM_REQUESTS = {1: 4, 4: 8, 16: 32}  # by concurrency
NUM_LONG, NUM_WARM, NUM_AT_ONCE = 3, 8, 16
_NUM_SPECIAL_IDS = 3  # the last ids of our checkpoints: no prompt has them in its text

_LETTERS = ["".join(pair) for pair in product(string.ascii_letters, repeat=2)]
_DIGITS = ["".join(pair) for pair in product(string.digits, repeat=2)]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a case, for the table."""

    name: str
    unit: str
    is_higher_better: bool = False

    @property
    def key(self) -> str:
        """In the JSON."""
        return f"{self.name} {self.unit}".replace(",", "").replace(" ", "_").replace("/", "_per_")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent together, and what is told of them."""

    name: str
    items: list[workloads.Item]
    max_concurrency: int
    figures: tuple[tuple[Figure, Callable[[Sequence[Measured]], float]], ...]


def cases(vocab_size: int, seed: int) -> list[Case]:
    """All cases with requests, in their order: the shared prefix must be cold, then warm, then used by many."""
    ids = vocab_size - _NUM_SPECIAL_IDS
    found = []
    for concurrency, num in NUM_REQUESTS.items():
        name = f"c{concurrency}"
        items = workloads.fixed(
            ids, num_seqs=num, num_input=PROMPT_TOKENS, num_output=OUTPUT_TOKENS, seed=_seed(seed, concurrency)
        )
        found.append(Case(name, items, concurrency, _speed_figures(name)))
    long = workloads.fixed(
        ids, num_seqs=NUM_LONG, num_input=LONG_PROMPT_TOKENS, num_output=1, seed=_seed(seed, LONG_PROMPT_TOKENS)
    )
    found.append(Case("long", long, 1, (_ttft("prompt of 1024, TTFT"),)))
    prefixed = workloads.shared_prefix(
        ids,
        num_seqs=1 + NUM_WARM + NUM_AT_ONCE,
        num_prefix=PREFIX_TOKENS,
        num_own=OWN_TOKENS,
        num_output=1,
        seed=_seed(seed, PREFIX_TOKENS),
    )
    cold, warm, at_once = prefixed[:1], prefixed[1 : 1 + NUM_WARM], prefixed[1 + NUM_WARM :]
    found.append(Case("prefix cold", cold, 1, (_ttft("prefix cold, TTFT"),)))
    found.append(Case("prefix warm", warm, 1, (_ttft("prefix warm, TTFT"),)))
    found.append(Case("prefix at once", at_once, NUM_AT_ONCE, (_ttft("16 suffixes at once, TTFT"),)))
    return found


def warm_up(vocab_size: int) -> list[tuple[list[workloads.Item], int]]:
    """Loads, each with its concurrency, that make a server do all of what is measured once; not measured."""
    ids = vocab_size - _NUM_SPECIAL_IDS
    loads = []
    for num_seqs, num_input in ((1, PROMPT_TOKENS), (NUM_AT_ONCE, PROMPT_TOKENS), (1, LONG_PROMPT_TOKENS)):
        items = workloads.fixed(ids, num_seqs=num_seqs, num_input=num_input, num_output=8, seed=-num_seqs - num_input)
        loads.append((items, num_seqs))
    return loads


CHAT = Figure("chat of 1 token", "ms")
READY = Figure("ready", "s")
MEMORY = Figure("memory after load (PSS)", "MB")


def chats(vocab_size: int, seed: int) -> list[str]:
    """Messages of a user."""
    items = workloads.fixed(
        vocab_size, num_seqs=NUM_CHATS, num_input=CHAT_TOKENS, num_output=1, seed=_seed(seed, CHAT_TOKENS)
    )
    return [text_of(item.prompt_token_ids) for item in items]


def text_of(token_ids: Sequence[int]) -> str:
    """A text of as many tokens, in the vocabulary of `bench.make_checkpoint`, with equal beginnings for equal ones.

    Two letters are a token there and two digits are one, and between them every tokenizer of GPT-2's kind splits.
    """
    tables = (_LETTERS, _DIGITS)
    return "".join(
        tables[position % 2][number % len(tables[position % 2])] for position, number in enumerate(token_ids)
    )


def wrong(case: Case, results: Sequence[Measured]) -> str:
    """The first request that failed, or did not make all of its tokens; empty if all is well."""
    for item, result in zip(case.items, results, strict=True):
        if result.error:
            return result.error
        if result.output_len != item.max_tokens:
            return f"{result.output_len} tokens instead of {item.max_tokens}"
    return ""


def _speed_figures(name: str) -> tuple[tuple[Figure, Callable[[Sequence[Measured]], float]], ...]:
    return (
        (Figure(f"{name}, output", "tok/s", is_higher_better=True), output_tokens_per_second),
        (Figure(f"{name}, TTFT p50", "ms"), lambda results: _p(50, [one.ttft for one in results])),
        (Figure(f"{name}, inter-token p50", "ms"), lambda results: _p(50, inter_token_times(results))),
        (Figure(f"{name}, inter-token p99", "ms"), lambda results: _p(99, inter_token_times(results))),
        (Figure(f"{name}, end to end p50", "ms"), lambda results: _p(50, [one.latency for one in results])),
    )


def _ttft(name: str) -> tuple[Figure, Callable[[Sequence[Measured]], float]]:
    return Figure(name, "ms"), lambda results: _p(50, [one.ttft for one in results])


def _p(percent: float, seconds: Sequence[float]) -> float:
    return 1000 * percentile(seconds, percent)


def output_tokens_per_second(results: Sequence[Measured]) -> float:
    """Output tokens over the time from the first request's start to the last one's end, prefill included."""
    began = min(result.began for result in results)
    ended = max(result.began + result.latency for result in results)
    return sum(result.output_len for result in results) / (ended - began)


def inter_token_times(results: Sequence[Measured]) -> list[float]:
    """Times between tokens. An event after the last token, which only says why the text ends, is none."""
    return [itl for result in results for itl in result.itls[: result.output_len - 1]]


def _seed(seed: int, salt: int) -> int:
    return 100_003 * seed + salt
