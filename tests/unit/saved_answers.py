"""Saved answers and their parts, as a client would have kept them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from novainfer.entrypoints.answer_faults import Echo, Recomputed, choice_faults
from novainfer.entrypoints.saved_answer import SavedAnswer, read_answer
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash
from novainfer.sampling.params import SamplingParams

IDS = [5, 6, 7]
FOUND = Recomputed(ChoiceReceipt(3, token_hash(IDS), "stop"), "it is true", IDS, None)
NO_TEXT = replace(FOUND, text="")
CHAT = {"id": "x", "model": "demo", "object": "chat.completion"}
CHUNK = CHAT | {"object": "chat.completion.chunk"}
TEXT = {"id": "y", "model": "demo", "object": "text_completion"}
Json = dict[str, Any]


def receipt_of(echo: Echo, n: int = 1) -> Json:
    receipt = Receipt(
        model="demo",
        model_digest="sha256:" + "0" * 64,
        mode="cpu avx512bf16 cpu/native bfloat16 tp1 exact",
        max_model_len=512,
        prompt_token_ids=tuple(echo.token_ids),
        eos_token_ids=(0,),
        after_prompt=True,
        params=SamplingParams(n=n, max_tokens=9, seed=1),
        choices=(FOUND.receipt,) * n,
    )
    data: Json = receipt.to_json()
    return data


def text_choice(text: Any = FOUND.text, index: int = 0, **more: Any) -> Json:
    return {"index": index, "text": text, "finish_reason": "stop", "stop_reason": None, **more}


def chat_choice(content: Any = FOUND.text, **more: Any) -> Json:
    message = {"role": "assistant", "content": content, "refusal": None, **more}
    return {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> Json:
    told = {} if content is None else {"content": content}
    return CHUNK | {"choices": [{"index": 0, "delta": {**told, **more}, "finish_reason": finish}]}


def stream(*events: Json | tuple[str, Json], end: str = "data: [DONE]\n\n") -> str:
    """Events, with their ids where they are given."""
    texts = []
    for event in events:
        place, data = event if isinstance(event, tuple) else (None, event)
        texts.append(("" if place is None else f"id: {place}\n") + f"data: {json.dumps(data)}\n\n")
    return "".join(texts) + end


def body(echo: Echo, *choices: Json, **more: Any) -> SavedAnswer:
    kind = TEXT if "text" in choices[0] else CHAT
    return read_answer(json.dumps(kind | {"choices": choices, "receipt": receipt_of(echo), **more}))


def faults(answer: SavedAnswer, echo: Echo, found: Recomputed = FOUND, index: int = 0) -> list[str]:
    return choice_faults(answer, index, found, echo)[0]
