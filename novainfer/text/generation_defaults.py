"""What a checkpoint's generation_config.json says of sampling: each request's defaults, and what has no effect here.

Read when a server starts, so that a number which no request could have is refused there and not with every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novainfer.checkpoint import read_json
from novainfer.errors import ConfigError, InvalidRequestError
from novainfer.sampling.params import MAX_ID_LIST, SamplingParams, validate

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # of no use where the likeliest token is taken
_NUMBERS = (*_SAMPLING, "repetition_penalty")
_PLAIN = 2**53  # up to it every whole number is a float
_ANY_VOCABULARY = 2**31  # ids beyond the model's are left out where its size is known
# Fields of transformers' GenerationConfig that would change the tokens and have no equivalent here, with the values
# that mean nothing. `null` means nothing anywhere.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_new_tokens": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """numbers: the sampling parameters that the file sets, by name.   banned_token_ids: what is never generated.

    without_effect: the names of its fields that would change an answer, and do not.
    """

    numbers: Mapping[str, float]
    banned_token_ids: tuple[int, ...] = ()
    without_effect: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> GenerationDefaults:
        """Of the checkpoint in `folder`. Raises `ConfigError` that names the file and the field."""
        found = {name: value for name, value in read_json(folder / FILE).items() if value is not None}
        is_greedy = found.get("do_sample") is False  # whatever else the file says
        numbers = {name: found[name] for name in _NUMBERS if name in found and not (is_greedy and name in _SAMPLING)}
        if is_greedy:
            numbers["temperature"] = 0.0
        banned, has_long_words = _banned(found)
        defaults = {name: _number(name, value) for name, value in numbers.items()}
        _check(folder, defaults, banned)
        ignored = [name for name, neutral in _WITHOUT_EFFECT.items() if name in found and found[name] not in neutral]
        if has_long_words:
            ignored.append("bad_words_ids")
        return cls(defaults, banned, tuple(ignored))


def _number(name: str, value: Any) -> Any:
    """The number in the type that a request's would have; what is none is left for the check."""
    if isinstance(value, float) and name == "top_k" and value.is_integer():
        return int(value)
    if type(value) is int and name != "top_k" and abs(value) <= _PLAIN:
        return float(value)
    return value


def _banned(found: Mapping[str, Any]) -> tuple[tuple[Any, ...], bool]:
    """Single tokens that must not be generated, and whether there are such sequences of several, too."""
    single, words = found.get("suppress_tokens", []), found.get("bad_words_ids", [])
    ids = list(single) if isinstance(single, list) else [single]
    has_long_words = False
    for word in words if isinstance(words, list) else [words]:
        if isinstance(word, list) and len(word) == 1:
            ids.append(word[0])
        else:
            has_long_words = True
    return tuple(ids), has_long_words


def _check(folder: Path, numbers: Mapping[str, Any], banned: tuple[Any, ...]) -> None:
    """By the same rules as a request, in which -1 may stand for no `top_k`."""
    shown: dict[str, Any] = {name: 0 if name == "top_k" and value == -1 else value for name, value in numbers.items()}
    if isinstance(shown.get("temperature"), float) and shown["temperature"] > 0.0:
        shown["temperature"] = max(shown["temperature"], 1.0)  # however small, it is another way to say "greedy"
    if len(banned) > MAX_ID_LIST // 2:  # requests have some of their own
        words = f"more than {MAX_ID_LIST // 2} entries"
        raise ConfigError(f"{folder / FILE}: suppress_tokens and bad_words_ids have {words}")
    try:
        validate(SamplingParams(**shown, banned_token_ids=banned), vocab_size=_ANY_VOCABULARY)
    except InvalidRequestError as error:
        if error.param == "banned_token_ids":
            raise ConfigError(f"{folder / FILE}: suppress_tokens and bad_words_ids hold token ids from 0") from None
        value = numbers.get(error.param or "")
        raise ConfigError(f"{folder / FILE}: {error.message.rstrip('.')}, not {value!r}") from None
