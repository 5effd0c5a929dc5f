"""Receipts: what it takes to compute an answer again, and the hash of its tokens. Pure data; no file is opened here.

A token is a function of weights, history, parameters, seed and position, so whoever has the checkpoint can check a
receipt (`novainfer verify`). It proves nothing by itself: it is a claim that can be refuted.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from novainfer.errors import InvalidRequestError
from novainfer.protocol.messages import FINISH_LENGTH, FINISH_STOP
from novainfer.sampling.params import SamplingParams, validate

VERSION = 1
MAX_PROMPT_TOKENS = 2**24
MAX_EOS_TOKENS = 1024
MAX_TEXT = 1024  # characters of a name
MAX_TOKEN_ID = 2**31 - 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def token_hash(token_ids: Iterable[int]) -> str:
    """'sha256:' and the SHA-256 of the ids as little-endian int64, in hexadecimal."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return "sha256:" + hashlib.sha256(ids.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class ChoiceReceipt:
    """One choice: how many ids were sampled, their `token_hash`, and why it ended ('stop' or 'length')."""

    num_tokens: int
    token_hash: str
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The answer to one prompt. Fields that no token depends on (logprobs, say) stay in `params` as they were."""

    version: int = VERSION
    model: str  # as the client named it
    model_digest: str  # see `novainfer.checkpoint.model_digest`
    mode: str  # see `novainfer.mode`
    max_model_len: int  # tokens; some checkpoints choose their rotary embedding by it
    prompt_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    after_prompt: bool  # the text goes on from the prompt's, as a completion's, or a continued chat message's
    params: SamplingParams  # seed resolved
    choices: tuple[ChoiceReceipt, ...]  # [params.n]

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        data = asdict(self)
        data["params"]["logit_bias"] = {str(key): bias for key, bias in self.params.logit_bias.items()}
        return data

    @classmethod
    def from_json(cls, data: object) -> Receipt:
        """A receipt from a parsed JSON object. Raises `InvalidRequestError` for anything that `to_json` cannot give."""
        values = _exact_fields(data, cls, "the receipt")
        if values["version"] != VERSION:
            raise _wrong("version", f"is not {VERSION}: this release cannot read it")
        params = _params(values["params"])
        choices = values["choices"]
        if not isinstance(choices, list) or len(choices) != params.n:
            raise _wrong("choices", f"must be a list of {params.n}, as params.n says")
        for name in ("model", "mode"):
            if not isinstance(values[name], str) or not 0 < len(values[name]) <= MAX_TEXT:
                raise _wrong(name, f"must be a text of 1 to {MAX_TEXT} characters")
        if not isinstance(values["after_prompt"], bool):
            raise _wrong("after_prompt", "must be true or false")
        prompt = _token_ids(values["prompt_token_ids"], "prompt_token_ids", MAX_PROMPT_TOKENS)
        if not prompt:
            raise _wrong("prompt_token_ids", "is empty")
        return cls(
            model=values["model"],
            model_digest=_digest(values["model_digest"], "model_digest"),
            mode=values["mode"],
            max_model_len=_count(values["max_model_len"], "max_model_len", MAX_TOKEN_ID),
            prompt_token_ids=prompt,
            eos_token_ids=_token_ids(values["eos_token_ids"], "eos_token_ids", MAX_EOS_TOKENS),
            after_prompt=values["after_prompt"],
            params=params,
            choices=tuple(_choice(choice, params.max_tokens) for choice in choices),
        )


def _params(data: object) -> SamplingParams:
    """Lists are tuples and the keys of logit_bias numbers again; `validate` looks at every value."""
    known = {"grammar": "", **data} if isinstance(data, dict) else data  # older receipts are of answers without one
    values = dict(_exact_fields(known, SamplingParams, "params"))
    if values["seed"] is None:
        raise _wrong("seed", "is missing: only a resolved request can be computed again")
    for name in ("allowed_token_ids", "banned_token_ids", "stop", "stop_token_ids"):
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
        elif values[name] is not None or name != "allowed_token_ids":
            raise _wrong(name, "must be a list")
    biases = values["logit_bias"]
    if not isinstance(biases, dict) or not all(re.fullmatch(r"[0-9]{1,10}", str(key)) for key in biases):
        raise _wrong("logit_bias", "must be an object whose keys are token ids")
    values["logit_bias"] = {int(key): bias for key, bias in biases.items()}
    params = SamplingParams(**values)
    validate(params, vocab_size=MAX_TOKEN_ID + 1)  # the engine checks against the model's own width
    return params


def _choice(data: object, max_tokens: int) -> ChoiceReceipt:
    values = _exact_fields(data, ChoiceReceipt, "a choice")
    if values["finish_reason"] not in (FINISH_STOP, FINISH_LENGTH):
        raise _wrong("finish_reason", f"must be '{FINISH_STOP}' or '{FINISH_LENGTH}'")
    num_tokens = _count(values["num_tokens"], "num_tokens", max_tokens)
    return ChoiceReceipt(num_tokens, _digest(values["token_hash"], "token_hash"), values["finish_reason"])


def _exact_fields(data: object, kind: type, what: str) -> dict[str, Any]:
    """`data`, if it is an object with the fields of the dataclass `kind` and no others."""
    names = {field.name for field in fields(kind)}
    if not isinstance(data, dict):
        raise InvalidRequestError(f"{what} must be a JSON object.")
    for name in sorted(names - data.keys()):
        raise InvalidRequestError(f"{what} has no field '{name}'.", param=name)
    for name in sorted(map(str, data.keys() - names)):
        raise InvalidRequestError(f"{what} has an unknown field {name[:MAX_TEXT]!r}.", param=name[:MAX_TEXT])
    return data


def _token_ids(value: object, name: str, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise _wrong(name, f"must be a list of at most {most} token ids")
    if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise _wrong(name, f"holds something that is not a token id (0 to {MAX_TOKEN_ID})")
    return tuple(value)


def _count(value: object, name: str, most: int) -> int:
    """Every count in a receipt is at least 1: an answer has a token."""
    if type(value) is not int or not 1 <= value <= most:
        raise _wrong(name, f"must be an integer from 1 to {most}")
    return value


def _digest(value: object, name: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _wrong(name, "must be 'sha256:' and 64 hexadecimal digits")
    return value


def _wrong(name: str, complaint: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {complaint}.", param=name)
