"""Sampling parameters of one request: the record, its bounds, and nothing else.

Used by the gateway (validation), the scheduler (validation again, lengths, stop ids) and the workers (sampling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

from novainfer.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARACTERS = 2048  # of all together: each is a state of an automaton (sampling/stop.py)
MAX_ID_LIST = 4096
MAX_BIAS = 100.0
MAX_GRAMMAR_BYTES = 64 * 1024  # in UTF-8
MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-3  # below it, logits divided by it leave float32; 0 is greedy


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a choice ends. `temperature == 0` means greedy. Not to be changed once it is made;
    frozen, it would take three times as long to make, which each request does in three processes.

    A resolved request always has a seed; `None` means "draw one when the request is accepted".
    `logprobs` is the number of alternatives to report beside the sampled token (0 = the sampled one alone,
    None = nothing); `prompt_logprobs` the same for every prompt token after the first.
    The fields that hold several values take any list or tuple, `stop` one string as well; None is none of them.
    Raises `InvalidRequestError` for anything else there; all other types and bounds are checked by `validate`.
    `grammar` is what the text has to be, in Lark as llguidance reads it (see `grammars`); empty: anything.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @classmethod
    def for_embedding(cls, seed: int | None = 0) -> SamplingParams:
        """Of a request that samples nothing (`AddRequest.embed`), so that the seed means nothing: there is one place
        behind the prompt, where it would.
        """
        return cls(max_tokens=1, temperature=0.0, seed=seed)

    @property
    def penalises(self) -> bool:
        """Whether a token's logits depend on which tokens came before it, beside what the model makes of them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def __post_init__(self) -> None:
        kinds = type(self.banned_token_ids), type(self.stop), type(self.stop_token_ids), type(self.logit_bias)
        if kinds != _PLAIN_KINDS or self.allowed_token_ids is not None:
            self._make_plain()

    def _make_plain(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            if type(value) is not tuple and not (value is None and name == "allowed_token_ids"):
                setattr(self, name, _as_tuple(name, value))
        if type(self.logit_bias) is not dict:
            if self.logit_bias is not None:
                raise InvalidRequestError("logit_bias must be a dict of token ids and numbers.", param="logit_bias")
            self.logit_bias = {}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


# name -> (lowest, highest), both allowed
FLOAT_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
INT_BOUNDS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_PLAIN_KINDS = (tuple, tuple, tuple, dict)
_LISTS = ("allowed_token_ids", "banned_token_ids", "stop", "stop_token_ids")
_BOOLS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
_NUMBERS = tuple(name for name in (*FLOAT_BOUNDS, *INT_BOUNDS, *_BOOLS) if name != "seed")  # each request has its own
_numbers = attrgetter(*_NUMBERS)
_lists = attrgetter(*_LISTS, "logit_bias")


def validate(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise `InvalidRequestError` for the first field out of bounds. Pure; run at every door.

    vocab_size: width of the logits (not of the tokenizer); every token id named must lie below it.
    """
    values = _numbers(params)
    try:
        _check_numbers(values, tuple(map(type, values)))
    except TypeError:  # one has no hash, so it is none
        _check_fields(params)
    seed = params.seed
    if seed is not None and not (type(seed) is int and 0 <= seed <= MAX_SEED):  # as nearly all are
        _check_number("seed", seed, *INT_BOUNDS["seed"], integral=True)
    if params.allowed_token_ids is not None or any(_lists(params)):
        _check_token_ids(params, vocab_size)
        _check_stop_strings(params.stop)
    if params.grammar != "":
        _check_grammar(params)


@lru_cache(maxsize=1024)
def _check_numbers(values: tuple[Any, ...], kinds: tuple[type, ...]) -> None:
    """`_check_fields` once for what many requests have alike. kinds: of the values, since 1 is True, and 1.0."""
    _check_fields(SamplingParams(**dict(zip(_NUMBERS, values, strict=True))))


def _check_fields(params: SamplingParams) -> None:
    """All that stands in no list."""
    for name, (low, high) in FLOAT_BOUNDS.items():
        value = getattr(params, name)
        if not (type(value) is float and low <= value <= high):  # as it nearly always is
            _check_number(name, value, low, high, integral=False)
    for name, (low, high) in INT_BOUNDS.items():
        value = getattr(params, name)
        if not (type(value) is int and low <= value <= high) and not (value is None and name in _OPTIONAL):
            _check_number(name, value, low, high, integral=True)
    for name in _BOOLS:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequestError(f"{name} must be true or false.", param=name)
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidRequestError(f"temperature must be 0 or at least {MIN_TEMPERATURE:g}.", param="temperature")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError("min_tokens must not be above max_tokens.", param="min_tokens")


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        wanted = "a string or a list of strings" if name == "stop" else "a list of token ids"
        raise InvalidRequestError(f"{name} must be {wanted}.", param=name)
    return tuple(value)


def _check_number(name: str, value: object, low: float, high: float, *, integral: bool) -> None:
    kinds = (int,) if integral else (int, float)
    # An integer is finite, but may be beyond what `isfinite` can take.
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, kinds) or not is_finite:
        raise InvalidRequestError(f"{name} must be a finite {'integer' if integral else 'number'}.", param=name)
    if not low <= value <= high:
        form = "d" if integral else "g"
        raise InvalidRequestError(f"{name} must be between {low:{form}} and {high:{form}}.", param=name)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"):
        ids = getattr(params, name)
        if ids is None:
            continue
        if len(ids) > MAX_ID_LIST:
            raise InvalidRequestError(f"{name} has more than {MAX_ID_LIST} entries.", param=name)
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"{name} holds a token id outside 0..{vocab_size - 1}.", param=name)
    for bias in params.logit_bias.values():
        _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS, integral=False)
    if params.allowed_token_ids is not None:
        if not set(params.allowed_token_ids) - set(params.banned_token_ids):
            raise InvalidRequestError("allowed_token_ids leaves no token to choose.", param="allowed_token_ids")
    elif len(set(params.banned_token_ids)) >= vocab_size:
        raise InvalidRequestError("banned_token_ids leaves no token to choose.", param="banned_token_ids")


def _check_grammar(params: SamplingParams) -> None:
    """Of the text, no more than its bounds: what it says is looked at where it is made (`grammars.check_grammar`)."""
    grammar = params.grammar
    if not isinstance(grammar, str) or grammar.lstrip().startswith("{"):  # as llguidance's JSON form does
        raise InvalidRequestError("grammar must be a text in Lark.", param="grammar")
    if len(grammar) > MAX_GRAMMAR_BYTES or len(grammar.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(f"grammar has more than {MAX_GRAMMAR_BYTES} bytes.", param="grammar")
    if any("\ud800" <= char <= "\udfff" for char in grammar):
        raise InvalidRequestError("grammar holds half of a surrogate pair, which is not text.", param="grammar")
    if params.min_tokens > 0:
        words = "min_tokens cannot be combined with a grammar, which may leave nothing but an end."
        raise InvalidRequestError(words, param="min_tokens")


def _check_stop_strings(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has more than {MAX_STOP_STRINGS} strings.", param="stop")
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop")
    if sum(map(len, stop)) > MAX_STOP_CHARACTERS:
        words = f"the stop strings must have no more than {MAX_STOP_CHARACTERS} characters together."
        raise InvalidRequestError(words, param="stop")
