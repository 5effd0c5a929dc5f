"""`/server_info`: what a server is, for whoever has a key, and nothing that is nobody's business."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novainfer import __version__
from novainfer.transport.addresses import Endpoint
from tests.online.conftest import Pair
from tests.online.gateways import SERVED_NAME, GatewayThread, config_for
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

PATHS = ("/server_info", "/get_server_info")


def told(server: RunningServer, **headers: str) -> dict[str, Any]:
    with server.http(**headers) as http:
        answer = http.get("/server_info")
        mode = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).headers["x-novainfer-mode"]
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    assert found["mode"] == mode
    return found


def test_given_the_demo_model_when_asked_then_the_server_says_what_it_is(server: RunningServer) -> None:
    found = told(server)
    mode, dtype = found.pop("mode"), found["model"].pop("dtype")
    assert f" {dtype} tp1 " in mode
    assert found.pop("uptime_seconds") > 0
    assert found["limits"].pop("max_num_batched_tokens") >= 64
    assert found["limits"].pop("num_blocks") > 0
    assert found == {
        "version": __version__,
        "status": "ok",
        "reason": None,
        "model": {
            "names": ["demo"],
            "architecture": "Qwen3ForCausalLM",
            "quantization": None,
            "kv_cache_dtype": dtype,
            "max_model_len": 2048,
            "vocab_size": 640,
        },
        "limits": {"max_num_seqs": 64, "block_size": 16, "max_live_requests": 2048},
        "parallel": {"tensor_parallel_size": 1, "replicas": 1, "num_gateways": 1},
        "features": {
            "prefix_caching": True,
            "web_ui": True,
            "speculation": None,
            "tool_call_parser": "hermes",
            "reasoning_parser": None,
        },
    }


def test_given_options_that_are_not_the_defaults_when_asked_then_they_are_told_and_no_secret_is(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    keys = tmp_path / "secret-keys"
    keys.write_text("tenant-name:sk-secret weight=2\n")
    flags = ["--api-key-file", str(keys), "--quantization", "int8", "--dtype", "float32", "--kv-cache-dtype", "int8"]
    flags += ["--max-num-seqs", "3", "--max-num-batched-tokens", "96", "--num-blocks", "200", "--max-model-len", "300"]
    flags += ["--no-enable-prefix-caching", "--no-web-ui", "--speculation", "prompt-lookup", "--replicas", "2"]
    flags += ["--tool-call-parser", "none", "--served-model-name", "one,two", "--max-live-requests", "7"]
    closed = start_server(*flags)
    with closed.http() as http:
        assert {http.get(path).status_code for path in PATHS} == {401}
    found = told(closed, authorization="Bearer sk-secret")
    model, limits = found["model"], found["limits"]
    assert model["names"] == ["one", "two"]
    assert (model["dtype"], model["quantization"], model["kv_cache_dtype"]) == ("float32", "int8", "int8")
    assert (model["max_model_len"], limits["num_blocks"], limits["max_num_seqs"]) == (300, 200, 3)
    assert (limits["max_num_batched_tokens"], limits["max_live_requests"]) == (96, 7)
    assert found["parallel"] == {"tensor_parallel_size": 1, "replicas": 2, "num_gateways": 1}
    assert found["features"] == {
        "prefix_caching": False,
        "web_ui": False,
        "speculation": "prompt-lookup",
        "tool_call_parser": None,
        "reasoning_parser": None,
    }
    text = json.dumps(found)
    assert not [word for word in ("secret", "tenant-name", "/", "demo") if word in text.replace("cpu/native", "")]


def test_given_a_scripted_engine_when_asked_by_either_path_then_the_checkpoints_path_is_not_told(
    pair: Pair, tiny_model: Path
) -> None:
    for path in PATHS:
        answer = pair.http.get(path)
        assert str(tiny_model) not in answer.text
        found = answer.json()
        assert found["model"]["names"][0] == SERVED_NAME
        assert (found["model"]["architecture"], found["model"]["dtype"]) == (None, "float32")


def test_given_no_engine_when_asked_then_what_only_that_knows_is_null(tiny_model: Path, tmp_path: Path) -> None:
    gateway = GatewayThread(config_for(tiny_model), Endpoint(f"ipc://{tmp_path}/s"))
    try:
        with gateway.http() as http:
            answer = http.get("/server_info")
    finally:
        gateway.close()
    found = answer.json()
    assert (answer.status_code, found["status"], found["reason"]) == (200, "unavailable", "no engine")
    assert found["mode"] is None
    assert [found["limits"][name] for name in ("max_num_seqs", "num_blocks", "max_num_batched_tokens")] == [None] * 3
    assert (found["model"]["dtype"], found["model"]["max_model_len"]) == (None, None)
