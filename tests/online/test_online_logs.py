"""The log of a real server as JSON: every line an object, requests by their ids, nothing of what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

SECRET = "xylophone"


def test_given_json_logs_when_requests_end_and_a_rank_dies_then_every_line_is_an_object_and_no_text_is_in_them(
    tmp_path: Path,
) -> None:
    flags = ("--log-format", "json", "--log-requests", "--log-level", "debug")
    with RunningServer(*flags, log=tmp_path / "log") as server:
        with server.http(**{"x-request-id": "my-own-id"}) as http:
            body = {"prompt": f"{SECRET} {SECRET}", "max_tokens": 5, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            server.processes()["worker 0.0"].kill()
            assert http.post("/v1/completions", json=body).status_code == 200
        server.stop()
        lines = [json.loads(line) for line in server.errors.splitlines()]
    for line in lines:
        assert {"ts", "level", "process", "logger", "message"} <= line.keys()
    assert {"supervisor", "gateway 0"} <= {line["process"] for line in lines}
    ends = [line for line in lines if line.get("request_id") == "my-own-id" and "outcome" in line]
    assert len(ends) == 2
    for line in ends:
        assert line["outcome"] == "finished"
        assert line["generation_tokens"] == 5
        assert 0 < line["first_token_ms"] <= line["last_token_ms"]
    assert any(
        "has died" in line["message"] or "ended" in line["message"] for line in lines if line["level"] == "error"
    )
    assert SECRET not in server.errors
