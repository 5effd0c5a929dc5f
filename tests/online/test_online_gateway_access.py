"""API keys on every route, limits for each key and for all, CORS, and strict parameters."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.app import ROUTES
from gateway.auth import PAGE_PATHS
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import ScriptedScheduler
from tests.online.gateways import GatewayThread, start_pair

pytestmark = pytest.mark.stage2

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
OPEN = {"/livez", "/readyz", *PAGE_PATHS}


@pytest.fixture(scope="module")
def locked(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ScriptedScheduler, GatewayThread]]:
    """A gateway with keys, a limit of two requests a key and three in all, CORS and strict parameters."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text("# who: what\nalice:key-a\nbob: key-b\n\nkey-c\n")
    scheduler, gateway = start_pair(
        tiny_model,
        folder / "run",
        Tokenizer.load(tiny_model).vocab_size,
        api_key=("key-main",),
        api_key_file=str(folder / "keys"),
        cors_origins=("https://ui.example",),
        strict_params=True,
        max_requests_per_key=2,
        max_live_requests=3,
    )
    yield scheduler, gateway
    gateway.close()
    scheduler.close()


def raw(gateway: GatewayThread, head: bytes) -> int:
    """The status of a hand-written request."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    return int(data.split(b" ", 2)[1])


def test_given_no_key_when_any_route_is_called_then_401_but_for_two_and_the_page(
    locked: tuple[ScriptedScheduler, GatewayThread],
) -> None:
    _, gateway = locked
    with gateway.http() as http:
        paths = {re.sub(r"{\w+:path}", "x", spec.path) for spec in ROUTES}
        for path in sorted(
            paths | OPEN | {"/ui/", "/ui/x.js", "/docs", "/openapi.json", "/v1/nothing", "/livez/", "/readyz/x"}
        ):
            for method in ("GET", "POST", "HEAD", "PUT", "DELETE"):
                response = http.request(method, path)
                if path in OPEN:
                    assert response.status_code in (200, 404 if path == "/" else 200, 405)
                else:
                    assert response.status_code == 401, (method, path)
                    assert response.headers["x-request-id"]
        error = http.get("/v1/models").json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")


@pytest.mark.parametrize("key", ["key-main", "key-a", "key-b", "key-c"])
def test_given_a_key_in_either_header_when_called_then_it_opens(
    locked: tuple[ScriptedScheduler, GatewayThread], key: str
) -> None:
    _, gateway = locked
    with gateway.http() as http:
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.post(CHAT, json=BODY, headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Basic key-main", b"key-main", b"Bearer key-main2", b"Bearer KEY-MAIN", b'Bearer "'],
)
def test_given_a_bad_key_when_called_then_401(locked: tuple[ScriptedScheduler, GatewayThread], value: bytes) -> None:
    _, gateway = locked
    assert raw(gateway, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: " + value + b"\r\n") == 401
    odd = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xc3\xa9\r\n"
    twice = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nAuthorization: Bearer x\r\n"
    assert raw(gateway, odd) == 401
    assert raw(gateway, twice) == 401


@pytest.mark.parametrize(
    "target",
    ["//v1/models", "/v1/../v1/models", "/%2fv1/models", "/v1/models;a", "/V1/models", "/livez/../v1/models",
     "/livez%2f..%2fv1/models", "http://x/v1/models", "http://x/livez/../v1/models", "/v1/models?/livez",
     "/v1/models#/livez", "/livez%00/v1/models", "/./v1/models"],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "a/livez?", "livez#"])
def test_given_odd_spellings_of_a_path_when_called_without_key_then_never_200(
    locked: tuple[ScriptedScheduler, GatewayThread], target: str, host: str
) -> None:
    _, gateway = locked
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nX-Forwarded-Prefix: /livez\r\nX-Original-URL: /livez\r\n"
    assert raw(gateway, request.encode()) in (400, 401)


def test_given_a_key_at_its_limit_when_it_asks_for_more_then_429_and_at_the_total_503(
    locked: tuple[ScriptedScheduler, GatewayThread],
) -> None:
    scheduler, gateway = locked
    scheduler.tokens_before_pause = 1
    streams = []
    with gateway.http() as http:
        batch = http.post("/v1/completions", json={"prompt": ["a"] * 4}, headers={"x-api-key": "key-c"})
        for key in ("key-a", "key-a", "key-b"):
            context = http.stream("POST", CHAT, json={**BODY, "stream": True}, headers={"x-api-key": key})
            streams.append(context)
            assert context.__enter__().status_code == 200
        mine = http.post(CHAT, json=BODY, headers={"x-api-key": "key-a"})
        other = http.post(CHAT, json=BODY, headers={"x-api-key": "key-c"})
        assert (mine.status_code, other.status_code, batch.status_code) == (429, 503, 400)
        assert (mine.json()["error"]["code"], other.json()["error"]["code"]) == ("rate_limit_exceeded", "overloaded")
        for refused in (mine, other):
            assert int(refused.headers["retry-after"]) >= 1
            assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
        for context in streams:
            context.__exit__(None, None, None)
        scheduler.wait_for(lambda: gateway.service.limits.num_live == 0 and not scheduler.live)
        scheduler.tokens_before_pause = None
        assert http.post(CHAT, json=BODY, headers={"x-api-key": "key-a"}).status_code == 200


def test_given_a_request_of_another_key_when_cancelled_then_404(
    locked: tuple[ScriptedScheduler, GatewayThread],
) -> None:
    scheduler, gateway = locked
    scheduler.tokens_before_pause = 1
    with gateway.http() as http:
        headers = {"x-api-key": "key-a", "x-request-id": "shared"}
        with http.stream("POST", CHAT, json={**BODY, "stream": True}, headers=headers) as response:
            assert response.status_code == 200
            assert http.post("/v1/requests/shared/cancel", headers={"x-api-key": "key-b"}).status_code == 404
            assert http.post("/v1/requests/shared/cancel", headers={"x-api-key": "key-a"}).status_code == 200
            response.read()
        assert scheduler.added[-1].tenant == "alice"
    scheduler.tokens_before_pause = None


def test_given_strict_params_when_a_field_is_unknown_then_400(locked: tuple[ScriptedScheduler, GatewayThread]) -> None:
    _, gateway = locked
    with gateway.http(**{"x-api-key": "key-a"}) as http:
        response = http.post(CHAT, json={**BODY, "temprature": 0})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "temprature"


def test_given_cors_when_a_browser_asks_then_only_the_named_origin_is_allowed(
    locked: tuple[ScriptedScheduler, GatewayThread],
) -> None:
    _, gateway = locked
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with gateway.http() as http:
        allowed = http.options(CHAT, headers={"origin": "https://ui.example", **preflight})
        refused = http.options(CHAT, headers={"origin": "https://evil.example", **preflight})
        assert allowed.headers["access-control-allow-origin"] == "https://ui.example"
        assert "access-control-allow-origin" not in refused.headers
        answer = http.get("/v1/models", headers={"origin": "https://ui.example", "x-api-key": "key-a"})
        assert answer.headers["access-control-allow-origin"] == "https://ui.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_given_prompts_keys_and_paths_when_all_is_answered_then_no_log_or_metric_has_one(
    locked: tuple[ScriptedScheduler, GatewayThread], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, gateway = locked
    secret = "canary4711"
    caplog.set_level("DEBUG")
    messages = [{"role": "user", "content": secret}]
    with gateway.http() as http:
        mine = {"x-api-key": "key-a", "user-agent": secret}
        assert http.post(CHAT, json={**BODY, "messages": messages, "user": secret}, headers=mine).status_code == 200
        assert http.post(CHAT, json={**BODY, "messages": [{"role": secret}]}, headers=mine).status_code == 400
        assert http.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 401
        assert http.get(f"/{secret}%0d%0aERROR", headers=mine).status_code == 404
        with monkeypatch.context() as patch:
            patch.setattr(gateway.service, "start", lambda *arguments: [].pop())
            assert http.post(CHAT, json={**BODY, "messages": messages}, headers=mine).status_code == 500
        assert secret not in http.get("/metrics", headers=mine).text
    assert "pop from empty list" in caplog.text  # the check itself can see what is logged
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [record for record in ours if secret in record.getMessage()]
    for key in ("key-main", "key-a", "key-b", "key-c"):
        assert not [record for record in ours if key in record.getMessage()]
    scheduler.wait_for(lambda: gateway.service.limits.num_live == 0)
