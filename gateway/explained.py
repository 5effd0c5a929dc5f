"""Why a request took so long, told to whoever asked: where its time went, in numbers and in words."""

from __future__ import annotations

import math
import time
from typing import Any

from gateway.generation import Generation
from novainfer.client.output import ChoiceDelta
from novainfer.protocol.messages import (
    WAITED_BLOCKS,
    WAITED_GRAMMAR,
    WAITED_ROWS,
    WAITED_SHARE,
    WAITED_TOKENS,
    WAITED_WORKERS,
    Notes,
    PromptLogprobs,
    TokenOutput,
)

_WAITED = {
    WAITED_ROWS: "all rows were taken (--max-num-seqs)",
    WAITED_BLOCKS: "the KV cache had too few free blocks",
    WAITED_TOKENS: "other requests had the tokens of each step (--max-num-batched-tokens)",
    WAITED_SHARE: "its tenant had used its share of the server",
    WAITED_GRAMMAR: "few new grammars begin at once",
    WAITED_WORKERS: "there were no workers, and others took their place",
}
_PARTS = ("gateway_ms", "queue_ms", "prefill_ms", "decode_ms")
EXPLAINED_TIMES = ("total_ms", *_PARTS, "longest_gap_ms")
EXPLAINED_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "prefill_steps",
    "preemptions",
    "recomputed_tokens",
    "restarts",
)
_SHORTEST_PAUSE = 0.25  # of all the time: shorter ones are no cause by themselves
_SHORTEST_KNOWN = 0.05  # the same of a pause whose cause is known
_SHORTEST_SECOND = 0.2  # of all the time: what is shorter is not worth a sentence
_FEW_TOKENS = 8  # between which any pause is a large part


class ExplainedGeneration(Generation):
    """One that also keeps what `explanation` tells. Its tokens do not go the short way: that knows no single gap."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `Generation`, right after its requests were submitted."""
        super().__init__(*args, **kwargs)
        self._handed = self._ended = time.perf_counter()
        count = len(self.outputs)
        self._first, self._last, self._gap = [0.0] * count, [0.0] * count, [0.0] * count  # by choice; 0: there was none
        self._notes: dict[int, Notes] = {}  # by choice: those that have ended

    def _apply(self, item: TokenOutput | PromptLogprobs) -> ChoiceDelta | None:
        delta = super()._apply(item)
        if isinstance(item, TokenOutput):
            self._ended = now = time.perf_counter()
            choice = self._prompt_of[item.request_id] * self._n + item.choice
            if delta is not None and delta.token_ids:
                if self._last[choice]:
                    self._gap[choice] = max(self._gap[choice], now - self._last[choice])
                else:
                    self._first[choice] = now
                self._last[choice] = now
            if item.notes is not None:
                self._notes[choice] = item.notes
        return delta

    def explanation(self) -> dict[str, Any]:
        """The object `explain`; its times in milliseconds. `total_ms` is the sum of the next four."""
        begun = [(at, choice) for choice, at in enumerate(self._first) if at]
        first, leader = min(begun, default=(self._ended, 0))  # without a token: what came last
        last = max(self._last) if begun else self._ended
        notes = self._notes.get(leader)
        waited = 0.0 if notes is None else notes.queue_seconds
        if not begun and (notes is None or waited < 0):  # it ended while it waited, before its engine could say so
            waited = math.inf
        queued = min(max(waited, 0.0), max(first - self._handed, 0.0))
        parts = {
            "gateway_ms": _ms(self._handed - self._info.started),
            "queue_ms": _ms(queued),
            "prefill_ms": _ms(first - self._handed - queued),
            "decode_ms": _ms(last - first),
        }
        known = self._notes.values()
        told: dict[str, Any] = {
            "total_ms": round(sum(parts.values()), 1),
            **parts,
            "longest_gap_ms": _ms(max(self._gap)),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": sum([prompt.num_cached_tokens or 0 for prompt in self.prompts]),
            "generation_tokens": self.num_generated,
            "prefill_steps": self._prefill_steps(),
            "preemptions": sum([one.preemptions for one in known]),
            "recomputed_tokens": sum([one.recomputed_tokens for one in known]),
            "restarts": max([one.restarts for one in known], default=0),
            "waited_for": (notes.waited_for or None) if notes is not None else None,
        }
        return {"summary": summary_of(told), **told}

    def _prefill_steps(self) -> int:
        """Of all prompts; choices of one have it in common."""
        most: dict[int, int] = {}
        for choice, one in self._notes.items():
            most[choice // self._n] = max(most.get(choice // self._n, 0), one.prefill_steps)
        return sum(most.values())


def explained(generation: Generation) -> dict[str, Any]:
    """What an answer has beside its choices: `explain`, if it was asked for."""
    return {"explain": generation.explanation()} if isinstance(generation, ExplainedGeneration) else {}


def summary_of(told: dict[str, Any]) -> str:
    """Numbers as `ExplainedGeneration.explanation` has them, as one or two sentences, the largest cause first."""
    total, pause = told["total_ms"], _pause(told)
    if total <= 0:
        return "It took no time that could be measured."
    name, second = sorted(_PARTS, key=lambda part: -told[part])[:2]
    words = f"{_spell(told[name])} of {_spell(total)} went into {_cause(name, told)}"
    if pause and name == "decode_ms" and told["longest_gap_ms"] * 2 >= told[name]:
        return f"{pause[0].upper()}{pause[1:]}. In all, {words}."
    if pause:
        return f"{words}. {'Of' if name == 'decode_ms' else 'Beside'} that, {pause}."
    if told[second] >= _SHORTEST_SECOND * total:
        return f"{words}. Another {_spell(told[second])} went into {_cause(second, told)}."
    return f"{words}."


def _cause(name: str, told: dict[str, Any]) -> str:
    """What a part of the time is, and what explains its length."""
    if name == "gateway_ms":
        return "reading the request, its template and tokens, before an engine got it"
    if name == "queue_ms":
        reason = _WAITED.get(told["waited_for"] or "")
        return "waiting for its first step" + (f": {reason}" if reason else _replaced(told))
    if name == "prefill_ms":
        fresh = max(told["prompt_tokens"] - told["cached_tokens"], 0)
        counts = f"{_count(fresh, 'token')} in {_count(told['prefill_steps'], 'step')}"
        return f"the prompt ({counts}; {told['cached_tokens']} more were cached){_loss(told)}"
    return f"generating {_count(told['generation_tokens'], 'token')}"


def _loss(told: dict[str, Any]) -> str:
    """What may have made a prompt take longer than its tokens do."""
    if told["longest_gap_ms"] * 2 >= told["prefill_ms"]:
        return ""
    return _replaced(told) or (f", with {_count(told['preemptions'], 'preemption')}" if told["preemptions"] else "")


def _replaced(told: dict[str, Any]) -> str:
    restarts = told["restarts"]
    return f"; the engine or its workers were replaced meanwhile ({_count(restarts, 'time')})" if restarts else ""


def _pause(told: dict[str, Any]) -> str:
    """The longest pause between two tokens, and what it may be of; "" if it is none to speak of."""
    length, why = told["longest_gap_ms"], ""
    if told["restarts"]:
        why = f"the engine or its workers were replaced ({_count(told['restarts'], 'time')})"
    elif told["preemptions"]:
        why = f"others had its place ({_count(told['preemptions'], 'preemption')})"
    least = (_SHORTEST_KNOWN if why else _SHORTEST_PAUSE) * told["total_ms"]
    if not length or length < least or not (why or told["generation_tokens"] > _FEW_TOKENS):
        return ""
    lost = told["recomputed_tokens"]
    again = f", with {_count(lost, 'token')} computed again" if why and lost else ""
    return f"one pause between two tokens took {_spell(length)}" + (
        f"; in the request's time {why}{again}" if why else ""
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _spell(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 1)
