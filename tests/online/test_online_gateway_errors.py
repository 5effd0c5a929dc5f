"""Whatever is wrong with a request, the answer is OpenAI's error object with the right status, and nothing is held."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from novainfer.protocol.messages import OutputBatch, RequestRejected, TokenOutput
from tests.online.conftest import Pair

pytestmark = pytest.mark.stage2

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = 10**400


def check(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 2048
    assert response.headers["x-request-id"]
    assert int(response.headers["openai-processing-ms"]) >= 0
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-1, 101, "1", True, [], {}, HUGE]),
        ("top_p", [-0.1, 1.1, "x", False]),
        ("top_k", [-2, 1.5, True, 2**63, HUGE]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1, "0"]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1, 101]),
        ("n", [0, -1, 10**9, 1.0, True, HUGE]),
        ("max_tokens", [0, -1, 1.5, "5", True, 2**31]),
        ("min_tokens", [-1, 17, HUGE]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1", HUGE]),
        ("stop", [5, [5], "", [""], ["x"] * 17, "x" * 1025]),
        ("stop_token_ids", [[-1], [10**6], ["1"], [True], 5]),
        ("logit_bias", [{"x": 1}, {"1": 101}, {"10000": 1}, {"-1": 1}, {"1": "1"}, [1]]),
        ("allowed_token_ids", [[], [10**6], [-1]]),
        ("banned_token_ids", [[10**6], [1.5]]),
        ("bad_words", [["the fox jumps over it"], [""], [5], ["x"] * 257, ["x" * 129]]),
        ("ignore_eos", [1, "true"]),
        ("stream", [1, "yes"]),
        ("stream_options", [5, {"include_usage": 1}, {"include_usage": True}]),
        ("cache_salt", ["a b", "x" * 129, 5]),
        ("priority", [2**31, 0.5]),
        ("prefix_cache", [1]),
    ],
)
def test_given_a_field_out_of_bounds_when_sent_then_400_names_it(pair: Pair, field: str, values: list[object]) -> None:
    for value in values:
        for path, base in ((TEXT, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
            if (path, field) == (CHAT, "min_tokens") and value == 17:
                continue  # below a chat's default max_tokens
            content = json.dumps({**base, field: value})
            response = pair.http.post(path, content=content, headers={"content-type": "application/json"})
            check(response, 400, field)
    assert pair.scheduler.added == []


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [("max_tokens", 2**31, "1 and 2147483647"), ("top_p", 1.5, "0 and 1"), ("repetition_penalty", 0, "0.01 and 100")],
)
def test_given_a_number_out_of_bounds_when_sent_then_the_bounds_are_written_out(
    pair: Pair, field: str, value: float, bounds: str
) -> None:
    message = pair.post(TEXT, {"prompt": "hello", field: value}).json()["error"]["message"]
    assert message == f"{field} must be between {bounds}."


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "messages", []),
        (CHAT, "messages", "hello"),
        (CHAT, "messages", [{"role": "robot", "content": "x"}]),
        (CHAT, "messages", [{"content": "x"}]),
        (CHAT, "messages", [{"role": "user"}]),
        (CHAT, "messages", [{"role": "tool", "content": "x", "tool_call_id": 5}]),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        (CHAT, "top_logprobs", 3),
        (CHAT, "logprobs", 3),
        (CHAT, "response_format", {}),
        (CHAT, "response_format", {"type": None}),
        (CHAT, "response_format", {"type": "words"}),
        (CHAT, "response_format", {"json_schema": {}}),
        (CHAT, "response_format", {"type": "json_schema"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strang"}}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "guided_json", {"type": "object"}),
        (CHAT, "structured_outputs", "a"),
        (CHAT, "structured_outputs", {"xml": "a"}),
        (CHAT, "structured_outputs", {"regex": "a", "choice": ["a"]}),
        (CHAT, "structured_outputs", {"regex": "a("}),
        (CHAT, "structured_outputs", {"regex": ["a"]}),
        (CHAT, "structured_outputs", {"json": "{"}),
        (CHAT, "structured_outputs", {"json": {"pattern": "x" * 70_000}}),
        (TEXT, "structured_outputs", {"choice": []}),
        (TEXT, "structured_outputs", {"choice": ["a", 5]}),
        (TEXT, "structured_outputs", {"choice": "a"}),
        (TEXT, "structured_outputs", {"grammar": "start: nothing"}),
        (TEXT, "response_format", {"type": "json"}),
        (TEXT, "response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}),
        (CHAT, "chat_template", "{{ 1 }}"),
        (CHAT, "chat_template_kwargs", {"chat_template": "x"}),
        (CHAT, "chat_template_kwargs", {"messages": []}),
        (CHAT, "chat_template_kwargs", {"bos_token": "x"}),
        (CHAT, "chat_template_kwargs", {"range": 5}),
        (CHAT, "chat_template_kwargs", {"a b": 1}),
        (CHAT, "chat_template_kwargs", {f"a{i}": 1 for i in range(17)}),
        (CHAT, "chat_template_kwargs", {"_novainfer_deadline": 1e12}),
        (TEXT, "prompt", ""),
        (TEXT, "prompt", []),
        (TEXT, "prompt", [[]]),
        (TEXT, "prompt", [1.5]),
        (TEXT, "prompt", [True]),
        (TEXT, "prompt", [-1]),
        (TEXT, "prompt", [10**6]),
        (TEXT, "prompt", ["a", 1]),
        (TEXT, "prompt", ["a"] * 1025),
        (TEXT, "prompt", None),
        (TEXT, "n", 129),
        (TEXT, "logprobs", 21),
        (TEXT, "logprobs", True),
        (TEXT, "suffix", "x"),
        (TEXT, "best_of", 2),
        (TEXT, "guided_regex", "a"),
        (TEXT, "truncate_prompt_tokens", 5),
    ],
)
def test_given_a_wrong_or_later_feature_when_sent_then_400_names_it(
    pair: Pair, path: str, field: str, value: object
) -> None:
    base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    check(pair.post(path, {**base, field: value}), 400, field)
    assert pair.scheduler.added == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "deep": ' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"seed": ' + b"9" * 100_000 + b"}",
    ],
)
def test_given_a_body_that_is_no_request_when_sent_then_400(pair: Pair, body: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        check(
            pair.http.post(path, content=body, headers={"content-type": "application/json"}), 400, code="invalid_json"
        )


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, {"prompt": [-1]}, "a list of token ids (whole numbers from 0)"),
        (TEXT, {"prompt": "a", "stop": [None]}, "it is a string or a list of strings"),
        (TEXT, {"prompt": "a", "stop": ["x" * 1024, "y" * 1024, "z"]}, "no more than 2048 characters together"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0]: a tool is an object with a function that has a name"),
        (
            CHAT,
            {"messages": HELLO, "tools": [{"function": {"name": "f"}}, {"function": {"name": ""}}]},
            "tools[1]: a tool",
        ),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools[0]: a tool"),
        (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls must be"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls must be"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content must be"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "contents": "typo"}]}, "messages[1].content must be"),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id must"),
        ("/tokenize", {"messages": [{"role": "user", "content": []}]}, "messages[0].content must be"),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "only allowed when 'stream' is enabled"),
    ],
)
def test_given_a_value_of_a_wrong_shape_when_sent_then_400_says_where_and_what_it_should_be(
    pair: Pair, path: str, body: dict[str, Any], words: str
) -> None:
    assert words in check(pair.post(path, body), 400)["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_given_another_content_type_when_sent_then_415(pair: Pair, content_type: str) -> None:
    response = pair.http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": content_type})
    check(response, 415, code="unsupported_media_type")


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "x"])
def test_given_a_body_that_says_it_is_encoded_when_sent_then_415(pair: Pair, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    for path in (TEXT, CHAT, "/tokenize"):
        check(pair.http.post(path, content=b'{"prompt": "x"}', headers=headers), 415, code="unsupported_media_type")
    headers["content-encoding"] = "identity"
    assert pair.http.post(TEXT, content=b'{"prompt": "x", "max_tokens": 1}', headers=headers).status_code == 200


def test_given_a_body_over_the_limit_when_sent_then_413_by_length_and_by_bytes_read(pair: Pair) -> None:
    def chunks() -> Any:
        for _ in range(10):
            yield b" " * (1024 * 1024)

    headers = {"content-type": "application/json"}
    check(pair.http.post(TEXT, content=b" " * (9 * 1024 * 1024), headers=headers), 413, code="request_too_large")
    check(pair.http.post(TEXT, content=chunks(), headers=headers), 413, code="request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/requests/nothing/cancel", 404),
    ],
)
def test_given_no_such_route_when_called_then_the_error_is_openai_shaped(
    pair: Pair, method: str, path: str, status: int
) -> None:
    check(pair.http.request(method, path), status)


def test_given_an_unknown_model_when_called_then_404_model_not_found(pair: Pair) -> None:
    for path, base in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        for name in ("other", "../../etc/passwd", ""):
            error = check(pair.post(path, {**base, "model": name}), 404, "model", "model_not_found")
            assert "org/tiny, alias" in error["message"]
    with pytest.raises(openai.NotFoundError):
        pair.sdk.models.retrieve("nothing")
    assert pair.sdk.models.retrieve("org/tiny").id == "org/tiny"
    assert [model.id for model in pair.sdk.models.list()] == ["org/tiny", "alias"]


def test_given_too_long_a_request_when_sent_then_context_length_exceeded(pair: Pair) -> None:
    long = "hello " * 300
    much_too_long = "hello " * 300_000
    for text in (long, much_too_long):
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": text}]}), (TEXT, {"prompt": text})):
            error = check(pair.post(path, body), 400, code="context_length_exceeded")
            assert error["message"].startswith(
                "This model's maximum context length is "
            )  # clients look for these words
    check(pair.post(TEXT, {"prompt": long}), 400, "prompt", "context_length_exceeded")
    check(pair.post(TEXT, {"prompt": "hello", "max_tokens": 256}), 400, "max_tokens", "context_length_exceeded")
    check(pair.post(CHAT, {"messages": HELLO, "max_tokens": 250}), 400, "max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(400, None), (429, "rate_limit_exceeded"), (503, "overloaded")])
def test_given_a_refusal_by_the_engine_when_answered_then_it_is_an_http_error_also_for_streams(
    pair: Pair, stream: bool, status: int, code: str | None
) -> None:
    pair.scheduler.reject = lambda r: RequestRejected(r.request_id, status, "not now", "prompt", retry_after=1.5)
    response = pair.post(TEXT, {"prompt": "hello", "stream": stream})
    error = check(response, status, code=code)
    assert error["message"] == "not now"
    if status != 400:
        assert response.headers["retry-after"] == "2"
        assert 1500 <= int(response.headers["retry-after-ms"]) <= 1875  # up to a quarter more


def test_given_a_failure_in_mid_stream_when_read_then_one_error_event_ends_it_without_done(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 2

    def fail() -> None:
        pair.scheduler.wait_for(lambda: any(live.counts == [2] for live in pair.scheduler.live.values()))

        def send() -> None:
            (request_id,) = pair.scheduler.live
            pair.scheduler.live.clear()
            end = TokenOutput(request_id, 0, 2, [], "error", error="the logits were not finite")
            pair.scheduler.send_all(OutputBatch(pair.scheduler.epoch, 99, [end]))

        pair.scheduler.run_in_thread(send)

    with pair.http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
        assert response.status_code == 200
        fail()
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"] == {
        "message": "the logits were not finite",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert sum("error" in json.loads(line.removeprefix("data: ")) for line in lines) == 1

    stream = pair.sdk.chat.completions.create(model="alias", messages=HELLO, stream=True)
    assert next(stream).choices[0].delta.role == "assistant"
    fail()
    with pytest.raises(openai.APIError, match="not finite"):
        list(stream)


SECRET = "canary-4711"
WRONG: list[tuple[str, object]] = [
    *((name, SECRET) for name in ("temperature", "n", "seed", "stream", "logit_bias", "stop_token_ids", "ignore_eos")),
    *((name, [SECRET]) for name in ("stop_token_ids", "allowed_token_ids", "tools", "messages", "prompt_logprobs")),
    *((name, {SECRET: SECRET}) for name in ("logit_bias", "stop", "bad_words", "chat_template_kwargs")),
    ("response_format", {"type": SECRET}),
    ("tool_choice", SECRET),
    ("modalities", [SECRET]),
    ("reasoning_effort", [SECRET]),
    ("cache_salt", f"{SECRET} "),
    ("guided_json", {"a": SECRET}),
    ("model", SECRET),
    ("messages", [{"role": SECRET}]),
    ("messages", [{"role": "user", "content": [{"type": SECRET, SECRET: SECRET}]}]),
    ("messages", [{"role": "user", "content": SECRET * 1000}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"arguments": SECRET}}]}]),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{name}-{i}" for i, (name, _) in enumerate(WRONG)])
def test_given_a_wrong_value_when_refused_then_the_answer_does_not_repeat_it(
    pair: Pair, field: str, value: object
) -> None:
    response = pair.post(CHAT, {"messages": HELLO, "max_tokens": 1, field: value})
    assert response.status_code in (400, 404), response.text
    assert SECRET not in response.text + str(response.headers)


def test_given_a_chat_without_max_tokens_when_min_tokens_is_beyond_the_context_then_400(pair: Pair) -> None:
    for more in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        check(pair.post(CHAT, {"messages": HELLO, "min_tokens": 257, **more}), 400, "min_tokens")
    assert pair.scheduler.added == []


def test_given_bytes_that_are_no_http_when_sent_then_the_error_is_openai_shaped(pair: Pair) -> None:
    with socket.create_connection(("127.0.0.1", pair.gateway.port), timeout=20) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_given_request_ids_when_sent_then_sane_ones_come_back(pair: Pair) -> None:
    assert pair.http.get("/livez", headers={"x-request-id": "abc-123:x"}).headers["x-request-id"] == "abc-123:x"
    for bad in ("with space", "x" * 129, "", "né".encode().decode("latin-1")):
        returned = pair.http.get("/livez", headers={"x-request-id": bad.encode("latin-1")}).headers["x-request-id"]
        assert returned.startswith("req-")
    answer = pair.sdk.chat.completions.create(
        model="alias", messages=HELLO, max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert answer._request_id == "mine"
