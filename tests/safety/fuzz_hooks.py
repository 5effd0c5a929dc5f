"""Loaded into schemathesis: it keeps the answers short, and looks after the server between its cases.

`SAFETY_FUZZ_URL` says where the server is, `SAFETY_FUZZ_KEY` what opens it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import httpx
import schemathesis
from schemathesis import Case, CheckContext, GenerationMode, HookContext, Response

EVERY = 250  # cases between two looks
PATIENCE = 30.0  # seconds until the metrics say so; the engine reports several times a second
MOST_ITEMS = 300
LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")
LONGEST = {**dict.fromkeys(LENGTHS, 4), "max_output_tokens": 4, "n": 8}
WITNESS = {"prompt": "one", "max_tokens": 8, "temperature": 1, "seed": 5, "return_token_ids": True}
HELD = (
    "novainfer_gateway_live_requests",
    "novainfer_num_requests_running",
    "novainfer_num_requests_waiting",
    "novainfer_kv_cache_usage_ratio",
)
STEPS = "novainfer_engine_steps_total"
# A schema says what each field may be. These depend on another field, on the vocabulary, or on the model's template.
BETWEEN_FIELDS = {
    "min_tokens", "max_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs", "allowed_token_ids",
    "banned_token_ids", "bad_words", "logit_bias", "continue_final_message", "messages", "prompt", "n", "stop",
    "best_of", "stream_options", "receipt", "response_format", "structured_outputs",
    "tool_choice", "tools", "input", "instructions", "max_output_tokens", "text", "include",
    "cache_prompt", "chat_template_kwargs", "max_new_tokens", "min_new_tokens", "n_predict", "repeat_penalty", "think",
    "thinking", "system", "stop_sequences", "output_config", "output_format",
}  # fmt: skip


@schemathesis.hook
def before_load_schema(context: HookContext, raw_schema: dict[str, Any]) -> None:
    """Without sizes of thousands of items: making them takes most of the time, and the table of parameters has them."""
    nodes: list[Any] = [raw_schema]
    while nodes:
        node = nodes.pop()
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        if isinstance(node, dict) and isinstance(node.get("maxItems"), int) and node["maxItems"] > MOST_ITEMS:
            del node["maxItems"]


@schemathesis.hook
def before_call(context: HookContext, case: Case, **kwargs: Any) -> None:
    """What is allowed to be long is made short: thousands of cases have to be answered."""
    if not isinstance(case.body, dict) or not case.path.endswith(("completions", "responses", "messages")):
        return
    for name, most in LONGEST.items():
        value = case.body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and most < value < 2048:
            case.body[name] = most
    if case.path.endswith("messages"):  # which have to say how long they are
        return
    if case.path.endswith("responses"):
        if case.body.get("max_output_tokens") is None:
            case.body["max_output_tokens"] = 4
    elif all(case.body.get(name) is None for name in LENGTHS):
        case.body["max_tokens"] = 4


@schemathesis.check
def a_refusal_is_for_what_no_schema_can_say(context: CheckContext, response: Response, case: Case) -> None:
    """What the description allows is answered, but for rules between fields."""
    meta = case.meta
    if meta is None or meta.generation.mode != GenerationMode.POSITIVE or response.status_code != 400:
        return
    error = response.json()["error"]
    if "valid integer" in error["message"]:
        return  # 1.0 is one to a schema
    if is_of_messages(case):  # where nothing but the message says what is wrong
        assert any(name in error["message"] for name in (*BETWEEN_FIELDS, "context length", "grammar")), response.text
        return
    param = error["param"]
    assert param in BETWEEN_FIELDS, f"the description allows {param}, the server does not: {response.text}"


def is_of_messages(case: Case) -> bool:
    """An operation whose clients expect errors of another form."""
    return case.path.startswith("/v1/messages")


@schemathesis.check
def an_error_has_its_shape_and_tells_nothing(context: CheckContext, response: Response, case: Case) -> None:
    """A short text, and no trace of the inside."""
    if response.status_code < 400 or response.status_code == 503:
        return
    error = response.json()["error"]
    assert set(error) == ({"message", "type"} if is_of_messages(case) else {"message", "type", "param", "code"})
    assert 0 < len(error["message"]) < 2048
    assert "Traceback" not in response.text
    assert 'File "' not in response.text


class _Server:
    """What is looked at from time to time."""

    def __init__(self) -> None:
        headers = {"authorization": f"Bearer {os.environ['SAFETY_FUZZ_KEY']}"}
        self._http = httpx.Client(base_url=os.environ["SAFETY_FUZZ_URL"], trust_env=False, timeout=60, headers=headers)
        self._cases = 0
        self._alone = self._witness()

    def look(self) -> None:
        """At every `EVERY`-th case."""
        self._cases += 1
        if self._cases % EVERY:
            return
        before = self._metrics()[STEPS]
        assert self._witness() == self._alone, "the witness got other tokens than when it was alone"
        metrics = self._metrics()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if metrics[STEPS] > before and not any(metrics[name] for name in HELD):
                return
            metrics = self._metrics()
        raise AssertionError(f"the engine stands still at step {before}, or holds something: {metrics}")

    def _witness(self) -> Any:
        return self._http.post("/v1/completions", json=WITNESS).json()["choices"][0]["token_ids"]

    def _metrics(self) -> dict[str, float]:
        lines = self._http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, value in pairs}


_server: list[_Server] = []


@schemathesis.check
def the_engine_goes_on_and_holds_nothing(context: CheckContext, response: Response, case: Case) -> None:
    """Steps are made, a witness gets its tokens, and what requests held is free again."""
    if not _server:
        _server.append(_Server())
    _server[0].look()
