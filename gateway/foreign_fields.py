"""Fields of other servers' requests: those that mean a field of ours, and those that this server cannot follow.

What asks for another answer is refused. Only its neutral values pass: programs that know many servers send every field
that any of them has.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

from novainfer.errors import InvalidRequestError

UNSUPPORTED = frozenset({
    "adapter_id", "chat_template", "custom_logit_processor", "dry_multiplier", "dynatemp_range", "ebnf", "grammar",
    "input_ids", "json_schema", "length_penalty", "logits_processors", "logprob_token_ids", "lora", "lora_path",
    "lora_request", "min_completion_tokens", "mirostat", "mirostat_mode", "no_repeat_ngram_size", "num_beams",
    "prompt_embeds", "prompt_token_ids", "regex", "repetition_detection", "return_hidden_states", "return_prompt_text",
    "return_token_offsets", "smoothing_factor", "stop_regex", "structural_tag", "tfs", "tfs_z",
    "thinking_token_budget", "top_a", "top_n_sigma", "truncate", "truncate_prompt_tokens", "typical_p",
    "use_beam_search", "watermarking", "xtc_probability",
})  # fmt: skip
UNSUPPORTED_PREFIX = "guided_"
NO_LIMIT = ("n_predict", -1)
NO_OPS: dict[str, tuple[Any, ...]] = {  # and more values
    "suffix": ("",),
    "best_of": (1,),
    "function_call": ("none",),
    NO_LIMIT[0]: NO_LIMIT[1:],
}
LORA = "lora"  # llama.cpp's list, of which each has a scale
ON_WHEN_EMPTY = frozenset({"web_search_options"})
_ZERO, _ONE = (0.0, 0.0), (1.0, 1.0)
_NOT_ABOVE_ZERO, _FROM_ONE = (-math.inf, 0.0), (1.0, math.inf)
# From which number to which one a feature is off.
NEUTRAL: dict[str, tuple[float, float]] = {
    "dry_multiplier": _NOT_ABOVE_ZERO,
    "dynatemp_range": _ZERO,
    "length_penalty": _ONE,
    "mirostat": _ZERO,
    "mirostat_mode": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "num_beams": (0.0, 1.0),
    "smoothing_factor": _ZERO,
    "tfs": _FROM_ONE,
    "tfs_z": _FROM_ONE,
    "top_a": _ZERO,
    "top_n_sigma": _NOT_ABOVE_ZERO,
    "truncate": _NOT_ABOVE_ZERO,
    "typical_p": _FROM_ONE,
    "xtc_probability": _NOT_ABOVE_ZERO,
}
# Other names of fields, of llama.cpp's, TGI's and SGLang's clients.
SAME = {
    "cache_prompt": "prefix_cache",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# Whether to think, which a template is asked by an argument: Ollama's field, and that of Anthropic's and others.
KWARGS, _ENABLE = "chat_template_kwargs", "enable_thinking"
THINK, THINKING = "think", "thinking"
MODES = {"enabled": True, "disabled": False}
# What leaves it to the model, and how much: which has no effect.
LEFT_TO_IT = ("auto", "adaptive")
LEVELS = ("low", "medium", "high")


def rename(present: dict[str, Any], strange: list[str], fields: Set[str], unsupported: Set[str]) -> list[str]:
    """Put what has another name of one of our `fields` under that, in place; the `strange` names that are left.

    unsupported: names that are none there.
    Raises `InvalidRequestError` where the field is there, too, and says something else.
    """
    left = []
    for name in strange:
        if name in SAME and SAME[name] in fields and name not in unsupported:
            _put(present, name, SAME[name])
        elif name in (THINK, THINKING) and KWARGS in fields and not _is_left_to_it(name, present[name]):
            _put_thinking(present, name)
        else:
            left.append(name)
    return left


def _put(present: dict[str, Any], name: str, ours: str) -> None:
    value = present.pop(name)
    if _is_no_limit(name, value):
        return
    for other in (ours, "max_completion_tokens") if ours == "max_tokens" else (ours,):
        if other in present and not _is_same(value, present[other]):
            raise _contradicts(name, other)
    present[ours] = value


def _is_no_limit(name: str, value: object) -> bool:
    return type(value) is int and (name, value) == NO_LIMIT


def _put_thinking(present: dict[str, Any], name: str) -> None:
    value = present.pop(name)
    enable = _mode(value) if name == THINKING else value
    if not isinstance(enable, bool):
        wanted = "true or false" if name == THINK else f"an object with the type {' or '.join(MODES)} alone"
        raise InvalidRequestError(f"{name} must be {wanted}.", param=name)
    kwargs = present.get(KWARGS, {})
    if not isinstance(kwargs, dict):  # which is refused for that
        return
    if kwargs.get(_ENABLE) is not None and not _is_same(enable, kwargs[_ENABLE]):
        raise _contradicts(name, f"{KWARGS}.{_ENABLE}")
    present[KWARGS] = {**kwargs, _ENABLE: enable}


def _type(value: Any) -> str | None:
    """A budget beside it would be another answer."""
    told = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    kind = told.get("type")
    return kind if isinstance(kind, str) and len(told) == 1 else None


def _mode(value: Any) -> bool | None:
    return MODES.get(_type(value) or "")


def _is_left_to_it(name: str, value: Any) -> bool:
    return _type(value) in LEFT_TO_IT if name == THINKING else isinstance(value, str) and value in LEVELS


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _contradicts(name: str, ours: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is another name of {ours}, which is there and says otherwise.", param=name)


def changes_nothing(name: str, present: dict[str, Any]) -> bool:
    """Whether the value of one of `NO_OPS` asks for what an answer is without it."""
    value: object = present[name]
    if name == "suffix":
        return value == ""
    if name == NO_LIMIT[0]:
        return _is_no_limit(name, value)
    if name == "function_call":
        return value == "none" or (value == "auto" and not present.get("functions"))
    return type(value) is int and value == present.get("n", 1)  # the best n of n


def is_off(name: str, value: object) -> bool:
    """A feature that is switched off, or given nothing to do."""
    if name in NEUTRAL and isinstance(value, int | float) and not isinstance(value, bool):
        low, high = NEUTRAL[name]
        return low <= value <= high
    if name in (THINK, THINKING) and (_is_left_to_it(name, value) or _mode(value) is False):
        return True
    if name == LORA and isinstance(value, list):
        return all(isinstance(item, dict) and _is_zero(item.get("scale")) for item in value)
    return value is False or (value in ("", [], {}) and name not in NO_OPS.keys() | ON_WHEN_EMPTY)


def _is_zero(scale: object) -> bool:
    return isinstance(scale, int | float) and not isinstance(scale, bool) and scale == 0
