"""The small parts of the gateway that need no server: keys, limits, JSON strings, defaults, bodies."""

from __future__ import annotations

import asyncio
import hmac
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway import body as body_module
from gateway.auth import KeyRing
from gateway.body import ByteBudget, read_json
from gateway.context import RequestInfo
from gateway.errors import ApiError, to_api_error
from gateway.limits import Cost, Limits
from gateway.params import resolve_params
from gateway.schemas import MAX_FIELDS, MAX_PROMPTS, ChatRequest, CompletionRequest, parse
from gateway.sse import event, json_string
from novainfer.config import ServeConfig, ServerConfig
from novainfer.entrypoints.keys import seal_keys
from novainfer.errors import ConfigError, EngineError, InvalidRequestError, OverloadedError
from novainfer.protocol.messages import EngineInfo
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

INFO = EngineInfo(1, True, 400, 100)


def bearer(key: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key)]


def test_given_keys_from_all_sources_when_loaded_then_tenants_are_names_or_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("team a:secret:with:colons\n\n# no\nplain\n")
    ring = KeyRing.of(seal_keys(ServeConfig(server=ServerConfig(api_key=("one",), api_key_file=str(path)))))
    assert ring.tenant(bearer(b"secret:with:colons")) == "team a"
    tenants = {ring.tenant(bearer(key)) for key in (b"one", b"plain")}
    assert all(tenant and tenant.startswith("key-") and len(tenant) == 12 for tenant in tenants)
    assert len(tenants) == 2
    for offered in (b"", b"two", b"ONE", b"one ", b"\xff\xfe", b"x" * 65536):
        assert ring.tenant(bearer(offered)) == (ring.tenant(bearer(b"one")) if offered == b"one " else None)
    assert "one" not in repr(vars(ring))


def test_given_no_keys_when_asked_then_everybody_may_and_an_empty_file_is_an_error(tmp_path: Path) -> None:
    assert KeyRing.of(ServeConfig()).tenant([]) == ""
    for content in ("", "# only\n", "name:\n"):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError):
            seal_keys(ServeConfig(server=ServerConfig(api_key_file=str(tmp_path / "keys"))))


@pytest.mark.parametrize("server", [ServerConfig(api_key=("one",)), ServerConfig(api_key_file="keys")])
def test_given_keys_that_are_not_sealed_when_a_gateway_gets_them_then_it_refuses(server: ServerConfig) -> None:
    with pytest.raises(ConfigError, match="digests"):
        KeyRing.of(ServeConfig(server=server))


def test_given_places_when_reserved_and_released_twice_then_the_count_is_true() -> None:
    limits = Limits(max_live=3, max_per_tenant=2)
    first, second = limits.reserve("a"), limits.reserve("a")
    with pytest.raises(OverloadedError) as mine:
        limits.reserve("a")
    third = limits.reserve("b")
    with pytest.raises(OverloadedError) as all_:
        limits.reserve("c")
    assert (mine.value.status, all_.value.status) == (429, 503)
    with pytest.raises(InvalidRequestError):
        limits.reserve("c", Cost(prompts=3))
    for permit in (first, first, second, third, third):
        permit.release()
    assert limits.num_live == 0
    limits.draining = True
    with pytest.raises(OverloadedError, match="shutting down"):
        limits.reserve("a")


@settings(deadline=None)
@given(text=st.text())
def test_given_any_text_when_written_as_json_then_it_is_one_line_and_comes_back(text: str) -> None:
    quoted = json_string(text)
    assert json.loads(quoted) == text
    assert len(quoted.splitlines()) == 1
    frame = event({"text": text}).decode()
    assert json.loads(frame.removeprefix("data: ")) == {"text": text}
    assert len(frame.splitlines()) == 2


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (InvalidRequestError("x", param="p", code="c"), 400, "c", "invalid_request_error"),
        (OverloadedError("x", retry_after=1, status=429), 429, "rate_limit_exceeded", "rate_limit_error"),
        (OverloadedError("x", retry_after=1), 503, "overloaded", "server_error"),
        (EngineError("x"), 500, "engine_error", "server_error"),
        (ValueError("secret /path"), 500, "internal_error", "server_error"),
        (ApiError(413, "x" * 5000, "request_too_large"), 413, "request_too_large", "invalid_request_error"),
    ],
)
def test_given_any_exception_when_answered_then_it_has_openai_shape(
    error: Exception, status: int, code: str, kind: str
) -> None:
    answer = to_api_error(error)
    body = answer.body["error"]
    assert (answer.status, body["code"], body["type"]) == (status, code, kind)
    assert "secret" not in body["message"]
    assert len(body["message"]) < 1100


def test_given_model_defaults_when_a_field_is_absent_then_they_apply(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    tokenizer = Tokenizer.load(tmp_path)
    message = {"messages": [{"role": "user", "content": "x"}]}
    absent, _ = parse(ChatRequest, {**message, "temperature": None}, strict_params=True)
    given_, _ = parse(ChatRequest, {**message, "temperature": 0, "top_k": -1, "top_p": 1}, strict_params=True)
    first = resolve_params(absent, 10, tokenizer, INFO)
    second = resolve_params(given_, 10, tokenizer, INFO)
    assert (first.temperature, first.top_k, first.top_p, first.repetition_penalty) == (0.6, 20, 0.95, 1.1)
    assert (second.temperature, second.top_k, second.top_p, second.repetition_penalty) == (0.0, 0, 1.0, 1.1)
    assert (first.max_tokens, second.max_tokens) == (90, 90)


def test_given_logprobs_in_each_form_when_resolved_then_counts_are_right(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))

    def resolved(kind: Any, **fields: Any) -> tuple[int | None, int | None]:
        base = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
        request, _ = parse(kind, {**base, **fields}, strict_params=True)
        params = resolve_params(request, 1, tokenizer, INFO)
        return params.logprobs, params.prompt_logprobs

    assert resolved(ChatRequest) == (None, None)
    assert resolved(ChatRequest, top_logprobs=0) == (None, None)
    assert resolved(ChatRequest, logprobs=True) == (0, None)
    assert resolved(ChatRequest, logprobs=True, top_logprobs=5) == (5, None)
    assert resolved(CompletionRequest, logprobs=2) == (2, None)
    assert resolved(CompletionRequest, logprobs=2, echo=True) == (2, 2)
    assert resolved(CompletionRequest, logprobs=2, echo=True, prompt_logprobs=4) == (2, 4)
    assert resolved(CompletionRequest, echo=True) == (None, None)
    with pytest.raises(InvalidRequestError, match="streamed"):
        resolved(CompletionRequest, prompt_logprobs=1, stream=True)


def test_given_a_top_p_of_zero_when_resolved_then_it_is_taken_as_it_is(tmp_path: Path) -> None:
    """The samplers then keep the likeliest token alone."""
    request, _ = parse(ChatRequest, {**CHAT_BODY, "top_p": 0}, strict_params=True)
    params = resolve_params(request, 1, Tokenizer.load(write_tokenizer(tmp_path)), INFO)
    assert (params.temperature, params.top_p) == (1.0, 0.0)


def test_given_switched_off_features_when_sent_then_they_are_accepted() -> None:
    body = {"prompt": "x", "use_beam_search": False, "stream_options": {"include_usage": None}}
    request, ignored = parse(CompletionRequest, body, strict_params=False)
    assert (request.prompt, ignored) == ("x", ["use_beam_search"])


def test_given_a_body_that_stalls_when_read_then_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.01)

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"novainfer": RequestInfo("r", fields={b"content-type": b"application/json"})}
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_json(scope, receive, max_bytes=10, budget=ByteBudget(10, is_shared=False)))
    assert caught.value.status == 408


def test_given_an_engine_with_a_small_context_when_a_chat_fills_it_then_the_error_counts_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    request, _ = parse(ChatRequest, {"messages": [{"role": "user", "content": "x"}]}, strict_params=True)
    with pytest.raises(InvalidRequestError, match=r"maximum context length is 10 tokens.*11 tokens"):
        resolve_params(request, 10, tokenizer, replace(INFO, max_model_len=10))


@pytest.mark.parametrize("offered", [b"one", b"three", b"on", b"", b"\xff\xfe"])
def test_given_any_key_when_it_is_looked_up_then_every_digest_is_compared_in_constant_time(
    offered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(known: bytes, found: bytes) -> bool:
        compared.append((len(known), len(found)))
        return hmac.compare_digest(known, found)

    ring = KeyRing.of(seal_keys(ServeConfig(server=ServerConfig(api_key=("one", "two", "three")))))
    monkeypatch.setattr("gateway.auth.hmac", SimpleNamespace(compare_digest=compare))
    assert (ring.tenant(bearer(offered)) is None) == (offered not in (b"one", b"three"))
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_bias", "x"), ("logit_bias", None), ("chat_template_kwargs", 1)],
)
def test_given_a_map_of_very_many_wrong_entries_when_validated_then_few_complaints_are_made(
    field: str, value: object
) -> None:
    """Each costs time on the event loop."""
    entries = {f"_{i}": value for i in range(20_000)}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": [{"role": "user"}], field: entries})
    assert caught.value.error_count() == 1


def test_given_tokens_that_the_model_suppresses_when_resolved_then_they_are_banned_beside_the_requests_own(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"suppress_tokens": [5, 2**30], "bad_words_ids": [[6]]})
    )
    request, _ = parse(CompletionRequest, {"prompt": "x", "banned_token_ids": [7]}, strict_params=True)
    assert resolve_params(request, 10, Tokenizer.load(tmp_path), INFO).banned_token_ids == (7, 5, 6)


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user"}, {"role": "user", "content": "y", "foo": 0}]}, "messages[1].foo"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a b": 1}]}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"foo": {}}]}]}, "messages[0].tool_calls[0].foo"),
        (CHAT_BODY | {"tools": [{"function": {"name": "f", "foo": False}}]}, "tools[0].function.foo"),
        (CHAT_BODY | {"response_format": {"type": "text", "foo": ""}}, "response_format.foo"),
        (
            CHAT_BODY | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "foo": 1}}},
            "response_format.json_schema.foo",
        ),
        (CHAT_BODY | {"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ],
)
def test_given_strict_params_when_a_field_inside_of_another_is_unknown_then_its_path_is_named(
    body: dict[str, Any], path: str | None
) -> None:
    parse(ChatRequest, body, strict_params=False)
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatRequest, body, strict_params=True)
    assert caught.value.param == (path or "messages[0].content[0].(unprintable)")
    assert caught.value.code == "unknown_parameter"


def test_given_strict_params_when_all_fields_are_known_or_the_callers_own_then_they_are_taken() -> None:
    answer = {"role": "assistant", "refusal": None, "annotations": [], "tool_calls": [CALL], "foo": None}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"foo": {"bar": 1}}, "strict": True}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"}, answer, refusal],
        "tools": [tool],
        "documents": [{"foo": 1}],
        "chat_template_kwargs": {"foo": {"bar": 1}},
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
    }
    assert parse(ChatRequest, body, strict_params=True)[1] == []


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"best_of": 1}, {"best_of": 3, "n": 3}])
def test_given_a_feature_that_is_missing_when_it_asks_for_nothing_then_it_is_taken(fields: dict[str, Any]) -> None:
    assert parse(CompletionRequest, {"prompt": "x", **fields}, strict_params=True)[1] == []


@pytest.mark.parametrize(
    "fields", [{"function_call": "none"}, {"function_call": "auto"}, {"function_call": "auto", "functions": []}]
)
def test_given_the_older_form_of_tools_without_any_when_parsed_then_it_is_taken(fields: dict[str, Any]) -> None:
    assert parse(ChatRequest, CHAT_BODY | fields, strict_params=False)[1] == [*(fields.keys() - {"function_call"})]


@pytest.mark.parametrize(
    "name", ["functions", "audio", "structural_tag", "guided_json", "grammar", "web_search_options"]
)
def test_given_a_feature_that_is_missing_when_it_is_given_nothing_then_it_is_taken(name: str) -> None:
    nothing = ("", [], {}) if name != "web_search_options" else ()  # an empty object is a search with its defaults
    for value in (False, *nothing):
        assert parse(ChatRequest, CHAT_BODY | {name: value}, strict_params=False)[1] == [name]
    for value in (True, "x", ["x"], {"x": 1}, 0, *([] if nothing else [{}])):
        with pytest.raises(InvalidRequestError, match=f"{name} is not supported yet"):
            parse(ChatRequest, CHAT_BODY | {name: value}, strict_params=False)


def test_given_a_call_in_its_older_form_when_there_are_functions_then_it_is_refused() -> None:
    for fields in ({"function_call": {"name": "f"}}, {"function_call": "auto", "functions": [{"name": "f"}]}):
        with pytest.raises(InvalidRequestError, match="not supported yet"):
            parse(ChatRequest, CHAT_BODY | fields, strict_params=False)


def test_given_very_many_fields_or_prompts_when_parsed_then_the_schema_does_not_see_them() -> None:
    fields = {f"x{number}": number for number in range(MAX_FIELDS)}
    parse(ChatRequest, dict([*CHAT_BODY.items(), *fields.items()][:MAX_FIELDS]), strict_params=False)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_FIELDS} fields"):
        parse(ChatRequest, CHAT_BODY | fields, strict_params=False)
    for prompt in ([["not a token"]], ["x"], [None]):
        with pytest.raises(InvalidRequestError, match=f"1 to {MAX_PROMPTS} prompts"):
            parse(CompletionRequest, {"prompt": prompt * (MAX_PROMPTS + 1)}, strict_params=False)
    parse(CompletionRequest, {"prompt": [5] * (MAX_PROMPTS + 1)}, strict_params=False)


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"best_of": 2}, {"best_of": 1, "n": 2}, {"best_of": True}, {"best_of": 1.0}]
)
def test_given_a_feature_that_is_missing_when_it_asks_for_something_then_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="not supported yet"):
        parse(CompletionRequest, {"prompt": "x", **fields}, strict_params=False)
