"""Fields of other servers: taken where they mean one of ours or ask for nothing, refused where they ask for more."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.foreign_fields import NEUTRAL, NO_OPS, ON_WHEN_EMPTY, UNSUPPORTED
from gateway.response_chat import as_chat
from gateway.schemas import ChatRequest, CompletionRequest, ResponseRequest, TokenizeRequest, parse
from novainfer.errors import InvalidRequestError

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
INPUT: dict[str, Any] = {"input": "x"}
# As programs for many servers send them all, whatever the one at hand has: none asks for anything.
NOTHING: dict[str, Any] = {
    "typical_p": 1.0, "typical": 1, "tfs": 1, "tfs_z": 1.0, "top_a": 0, "mirostat": 0, "mirostat_mode": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
    "dry_sequence_breakers": ["\n"], "xtc_probability": 0, "xtc_threshold": 0.1, "top_n_sigma": -1,
    "dynatemp_range": 0, "smoothing_factor": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "length_penalty": 1.0,
    "samplers": ["top_k"], "custom_logit_processor": None, "lora": [], "adapter_id": "", "lora_request": None,
    "return_hidden_states": False, "stop_regex": None, "truncate": None, "use_beam_search": False, "grammar": "",
}  # fmt: skip


@pytest.mark.parametrize("fields", [{"repeat_penalty": 1.1}, {"repeat_penalty": 1.1, "repetition_penalty": 1.1}])
def test_given_another_name_when_parsed_then_it_is_our_field_and_nothing_is_ignored(fields: dict[str, Any]) -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT), (ResponseRequest, INPUT)):
        request, ignored = parse(kind, base | fields, strict_params=True)
        assert (request.repetition_penalty, ignored) == (1.1, [])


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_new_tokens": 7}, "max_tokens", 7),
        ({"n_predict": 7, "max_new_tokens": 7}, "max_tokens", 7),
        ({"n_predict": 0}, "max_tokens", 0),
        ({"min_new_tokens": 3}, "min_tokens", 3),
        ({"cache_prompt": False}, "prefix_cache", False),
        ({"cache_prompt": True}, "prefix_cache", True),
        ({"cache_prompt": None}, "prefix_cache", True),
    ],
)
def test_given_another_name_of_a_field_of_choices_when_parsed_then_it_is_that(
    fields: dict[str, Any], name: str, value: object
) -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        assert getattr(parse(kind, base | fields, strict_params=True)[0], name) == value


def test_given_no_limit_when_parsed_then_it_says_nothing_wherever_it_stands() -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        for most in (None, 5):
            request, ignored = parse(kind, base | {"max_tokens": most, "n_predict": -1}, strict_params=True)
            assert (request.max_tokens, ignored) == (most, [])
    request, _ = parse(ChatRequest, CHAT | {"max_completion_tokens": 5, "n_predict": -1}, strict_params=True)
    assert (request.max_completion_tokens, request.max_tokens) == (5, None)
    assert parse(ResponseRequest, INPUT | {"n_predict": -1}, strict_params=True)[1] == []
    for length in (-2, -1.0, 5):
        with pytest.raises(InvalidRequestError, match="n_predict is not supported yet"):
            parse(ResponseRequest, INPUT | {"n_predict": length}, strict_params=False)


@pytest.mark.parametrize(
    ("fields", "param", "ours"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "repetition_penalty"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens", "max_tokens"),
        ({"max_new_tokens": 5, "max_completion_tokens": 6}, "max_new_tokens", "max_completion_tokens"),
        ({"max_new_tokens": 5, "n_predict": 6}, "n_predict", "max_tokens"),
        ({"n_predict": True, "max_tokens": 1}, "n_predict", "max_tokens"),
        ({"min_new_tokens": 1, "min_tokens": 0}, "min_new_tokens", "min_tokens"),
        ({"cache_prompt": False, "prefix_cache": True}, "cache_prompt", "prefix_cache"),
        ({"think": True, "thinking": {"type": "disabled"}}, "thinking", "chat_template_kwargs.enable_thinking"),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": False}},
            "think",
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"think": True, "chat_template_kwargs": {"enable_thinking": 1}},
            "think",
            "chat_template_kwargs.enable_thinking",
        ),
    ],
)
def test_given_two_names_when_they_say_two_things_then_it_is_refused(
    fields: dict[str, Any], param: str, ours: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatRequest, CHAT | fields, strict_params=False)
    assert caught.value.message == f"{param} is another name of {ours}, which is there and says otherwise."
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "enabled"),
    [
        ({"think": True}, True),
        ({"think": False}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled", "budget_tokens": None}}, False),
        ({"thinking": {"type": "disabled"}, "think": False}, False),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"think": True, "chat_template_kwargs": {"enable_thinking": None}}, True),
    ],
)
def test_given_a_word_about_thinking_when_parsed_then_it_is_an_argument_of_the_template(
    fields: dict[str, Any], enabled: bool
) -> None:
    fields = {"chat_template_kwargs": {"a": 1}, **fields}
    kwargs = {**fields["chat_template_kwargs"], "enable_thinking": enabled}
    for kind, base in ((ChatRequest, CHAT), (ResponseRequest, INPUT), (TokenizeRequest, CHAT)):
        request, ignored = parse(kind, base | fields, strict_params=True)
        assert (request.chat_template_kwargs, ignored) == (kwargs, [])
    request, _ = parse(ResponseRequest, INPUT | fields, strict_params=True)
    assert as_chat(request)[0].chat_template_kwargs == kwargs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"think": "hugely"}, "think"),
        ({"think": 1}, "think"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking"),
        ({"thinking": {"type": ["enabled"]}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"think": True, "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_given_a_word_about_thinking_that_cannot_be_followed_when_parsed_then_it_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatRequest, CHAT | fields, strict_params=False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        *({"think": level} for level in ("low", "medium", "high")),
        *({"thinking": {"type": kind, "budget_tokens": None}} for kind in ("auto", "adaptive")),
    ],
)
def test_given_thinking_that_is_left_to_the_model_when_parsed_then_it_is_named_as_ignored(
    fields: dict[str, Any],
) -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT), (ResponseRequest, INPUT)):
        request, ignored = parse(kind, base | fields, strict_params=False)
        assert (getattr(request, "chat_template_kwargs", {}), ignored) == ({}, [*fields])


def test_given_a_text_completion_when_thinking_is_spoken_of_then_it_may_be_off_alone() -> None:
    for fields in ({"think": False}, {"thinking": {"type": "disabled"}}):
        assert parse(CompletionRequest, TEXT | fields, strict_params=False)[1] == [*fields]
    for fields in ({"think": True}, {"thinking": {"type": "enabled"}}, {"thinking": {"type": "auto", "x": 1}}):
        with pytest.raises(InvalidRequestError, match="is not supported yet"):
            parse(CompletionRequest, TEXT | fields, strict_params=False)


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("typical_p", (1, 1.5, 1e9), 0.99),
        ("tfs", (1, 2), 0.5),
        ("dry_multiplier", (-1, 0.0), 0.1),
        ("num_beams", (0, 1), 2),
        ("truncate", (-1, 0), 1),
        ("xtc_probability", (-0.5, 0), 0.1),
        ("lora", ([{"id": 0, "scale": 0.0}, {"scale": 0}],), [{"scale": 0}, {"scale": 0.5}]),
        ("lora", ([],), [{"scale": False}]),
        ("lora", ([],), [{"id": 0}]),
    ],
)
def test_given_a_switch_of_others_when_it_is_off_then_it_is_named_and_refused_otherwise(
    name: str, off: tuple[Any, ...], on: object
) -> None:
    for value in off:
        assert parse(ChatRequest, CHAT | {name: value}, strict_params=False)[1] == [name]
    with pytest.raises(InvalidRequestError, match=f"^{name} is not supported yet"):
        parse(ChatRequest, CHAT | {name: on}, strict_params=False)


def test_given_fields_of_others_with_neutral_values_when_parsed_then_they_are_named_alone() -> None:
    sent = [name for name, value in NOTHING.items() if value is not None]
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT), (ResponseRequest, INPUT)):
        assert parse(kind, base | NOTHING, strict_params=False)[1] == sent


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_given_a_feature_of_others_when_it_asks_for_something_then_it_is_refused(name: str) -> None:
    """Also where a number is its switch."""
    low, high = NEUTRAL.get(name, (math.inf, -math.inf))
    bounds = [bound for bound in (low, high) if math.isfinite(bound)]
    for value in (True, "x", ["x"], {"x": 1}, *(number for number in (-1, 0, 0.5, 1, 2) if not low <= number <= high)):
        with pytest.raises(InvalidRequestError, match=f"^{name} is not supported yet"):
            parse(ChatRequest, CHAT | {name: value}, strict_params=False)
    for value in (False, "", [], {}, *bounds):
        assert parse(ChatRequest, CHAT | {name: value}, strict_params=False)[1] == [name]


def test_the_lists_of_fields_when_read_then_each_of_them_is_one_of_the_refused() -> None:
    assert NEUTRAL.keys() <= UNSUPPORTED
    assert not UNSUPPORTED & (NO_OPS.keys() | ON_WHEN_EMPTY)
