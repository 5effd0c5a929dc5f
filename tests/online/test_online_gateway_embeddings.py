"""`/v1/embeddings` at the gateway: forms of input and answer, what is refused, and clients that leave."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from gateway import embedding
from gateway.routes import embeddings as routes
from gateway.schemas import MAX_INPUTS
from novainfer.embedding import Pooling, finish_vector, numbers_of
from novainfer.protocol.messages import RequestRejected
from novainfer.sampling.params import SamplingParams
from tests.fakes import HIDDEN_SIZE, scripted_vector
from tests.online.conftest import Pair

pytestmark = pytest.mark.stage2

PATH = "/v1/embeddings"


def wanted(ids: list[int], dimensions: int | None = None, *, normalize: bool = True) -> list[float]:
    return list(numbers_of(finish_vector(scripted_vector(ids), dimensions, normalize=normalize)))


def check(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error of OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    return str(error["message"])


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "id_lists"])
def test_given_each_form_of_input_when_embedded_then_the_vectors_come_in_order(pair: Pair, kind: str) -> None:
    ids = [pair.tokenizer.encode(text) for text in ("hello", "the quick fox")]
    given = {"text": "hello", "texts": ["hello", "the quick fox"], "ids": ids[0], "id_lists": ids}[kind]
    response = pair.post(PATH, {"model": "alias", "input": given})
    assert response.headers["x-novainfer-mode"] == pair.scheduler.mode
    answer = response.json()
    inputs = ids[: 1 if kind in ("text", "ids") else 2]
    count = sum(map(len, inputs))
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": wanted(one)} for i, one in enumerate(inputs)],
        "model": "alias",
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    pair.wait_idle()


def test_given_more_inputs_than_an_engine_gets_at_once_when_embedded_then_all_vectors_come_in_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_AT_ONCE", 3)
    inputs = [[5 + i] * (1 + i % 4) for i in range(11)]
    answer = pair.post(PATH, {"input": inputs}).json()
    assert [one["embedding"] for one in answer["data"]] == [wanted(one) for one in inputs]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, inputs))
    pair.wait_idle()


def test_given_more_inputs_than_an_engine_gets_at_once_when_it_works_then_the_others_have_no_place_of_the_queue(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MOST_AT_ONCE", 3)
    answers: list[httpx.Response] = []
    pair.scheduler.tokens_before_pause = 0
    body = {"input": [[7]] * 8}
    asking = threading.Thread(target=lambda: answers.append(pair.post(PATH, body, **{"x-request-id": "some"})))
    asking.start()
    pair.scheduler.wait_for(lambda: len(pair.scheduler.live) == 3)
    assert pair.gateway.service.limits.num_sequences == 3
    with pair.gateway.http() as other:
        assert other.post("/v1/requests/some/cancel").status_code == 200
    asking.join(20)
    check(answers[0], 409, code="cancelled")
    pair.wait_idle()


def test_given_the_sdk_when_it_asks_as_it_does_and_for_numbers_then_both_are_the_same(pair: Pair) -> None:
    texts = ["hello", "the quick fox"]
    by_default = pair.sdk.embeddings.create(model="alias", input=texts)
    numbers = pair.sdk.embeddings.create(model="alias", input=texts, encoding_format="float")
    assert [one.embedding for one in by_default.data] == [one.embedding for one in numbers.data]
    assert by_default.usage == numbers.usage
    text = pair.post(PATH, {"input": "hello", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(text), "<f4")
    assert vector.tolist() == numbers.data[0].embedding == wanted(pair.tokenizer.encode("hello"))


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize(("dimensions", "normalize"), [(3, None), (HIDDEN_SIZE, True), (1, False), (None, False)])
def test_given_dimensions_when_embedded_then_the_vector_is_cut_and_normalised_again(
    pair: Pair, dimensions: int | None, normalize: bool | None, encoding_format: str
) -> None:
    body = {"input": [5, 6], "dimensions": dimensions, "normalize": normalize, "encoding_format": encoding_format}
    found = pair.post(PATH, body).json()["data"][0]["embedding"]
    if encoding_format == "base64":
        data = base64.b64decode(found)
        found = list(struct.unpack(f"<{len(data) // 4}f", data))
    assert found == wanted([5, 6], dimensions, normalize=normalize is not False)


def test_given_fields_for_the_engine_when_embedded_then_it_gets_them(pair: Pair) -> None:
    body = {"input": "hello", "cache_salt": "salt", "prefix_cache": False, "priority": 3, "user": "u", "metadata": {}}
    response = pair.post(PATH, {**body, "add_special_tokens": False}, **{"x-request-id": "mine"})
    assert response.headers["x-novainfer-ignored"] == "metadata"
    (sent,) = pair.scheduler.added[-1:]
    assert sent.embed
    assert sent.params == SamplingParams.for_embedding()
    assert (sent.cache_salt, sent.use_prefix_cache, sent.priority) == ("salt", False, 3)
    assert (sent.answer, sent.emitted) == ("", [])
    assert "mine" in sent.aliases
    assert all(alias == "mine" or alias.startswith("embd-") for alias in sent.aliases)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[2**31]]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [{"text": "a"}]}, "input"),
        ({"input": [[[1]]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [[1]] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"input": "a", "dimensions": 2**70}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "dimensions": 3.0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "user": 1}, "user"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({"input": "a", "cache_salt": "\n"}, "cache_salt"),
        ({"input": "a", "priority": 2**31}, "priority"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_given_a_wrong_field_when_sent_then_400_names_it_and_nothing_reaches_the_engine(
    pair: Pair, body: dict[str, Any], param: str
) -> None:
    added = len(pair.scheduler.added)
    code = "missing_required_parameter" if body in ({}, {"input": None}) else None
    check(pair.post(PATH, body), 400, param, code)
    assert len(pair.scheduler.added) == added
    pair.wait_idle()


@pytest.mark.parametrize("given", ["hello " * 300, [[1], [1] * 257], "a" * 10**6])
def test_given_an_input_beyond_the_context_when_sent_then_400_says_so(pair: Pair, given: object) -> None:
    check(pair.post(PATH, {"input": given}), 400, "input", "context_length_exceeded")
    assert pair.post(PATH, {"input": [1] * 256}).status_code == 200  # as long as the context: nothing follows it


def test_given_an_unknown_model_or_a_checkpoint_with_another_pooling_when_asked_then_it_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(pair.post(PATH, {"input": "a", "model": "other"}), 404, "model", "model_not_found")
    monkeypatch.setattr(pair.gateway.service, "pooling", Pooling(refusal="It pools the mean."))
    assert check(pair.post(PATH, {"input": "a"}), 400, "model", "unsupported_pooling") == "It pools the mean."
    monkeypatch.setattr(pair.gateway.service, "pooling", Pooling(normalizes=False))
    found = pair.post(PATH, {"input": [5, 6]}).json()["data"][0]["embedding"]
    assert found == wanted([5, 6], normalize=False)


def test_given_more_vectors_than_an_answer_may_have_when_asked_then_400(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "MAX_VECTOR_BYTES", 4 * HIDDEN_SIZE * 2)
    assert pair.post(PATH, {"input": [[1], [2]]}).status_code == 200
    assert "at most 2" in check(pair.post(PATH, {"input": [[1], [2], [3]]}), 400, "input")


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_given_an_answer_of_many_parts_when_it_is_read_then_nothing_is_missing(
    pair: Pair, encoding_format: str
) -> None:
    inputs = [[i % 50, 3] for i in range(600)]
    whole = pair.post(PATH, {"input": inputs, "encoding_format": encoding_format})
    assert whole.headers.get("transfer-encoding") == ("chunked" if encoding_format == "float" else None)
    data = whole.json()["data"]
    assert [one["index"] for one in data] == [*range(600)]
    for one, ids in zip(data, inputs, strict=True):
        found = one["embedding"]
        if encoding_format == "base64":
            found = list(struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(found)))
        assert found == wanted(ids)
    pair.wait_idle()


@pytest.mark.parametrize(("status", "code"), [(400, None), (429, "rate_limit_exceeded"), (503, "overloaded")])
def test_given_a_refusal_by_the_engine_when_answered_then_it_is_an_http_error(
    pair: Pair, status: int, code: str | None
) -> None:
    pair.scheduler.reject = lambda r: RequestRejected(r.request_id, status, "not now", "prompt", retry_after=1.5)
    response = pair.post(PATH, {"input": ["hello", "fox"]})
    assert check(response, status, "input" if status == 400 else None, code) == "not now"
    pair.wait_idle()


def in_background(pair: Pair, answers: list[httpx.Response], **headers: str) -> threading.Thread:
    """A request for two embeddings, which the engine has and does not answer."""
    pair.scheduler.tokens_before_pause = 0
    asking = threading.Thread(target=lambda: answers.append(pair.post(PATH, {"input": ["hello", "fox"]}, **headers)))
    asking.start()
    pair.scheduler.wait_for(lambda: len(pair.scheduler.live) == 2)
    return asking


def test_given_a_vector_that_fails_when_answered_then_the_whole_request_does_and_the_others_are_cancelled(
    pair: Pair,
) -> None:
    answers: list[httpx.Response] = []
    asking = in_background(pair, answers)
    pair.scheduler.run_in_thread(lambda: pair.scheduler.fail(next(iter(pair.scheduler.live)), "it was not finite"))
    asking.join(20)
    assert check(answers[0], 500, code="engine_error") == "it was not finite"
    pair.wait_idle()


def test_given_a_request_when_it_is_cancelled_by_its_id_then_409_says_so(pair: Pair) -> None:
    answers: list[httpx.Response] = []
    asking = in_background(pair, answers, **{"x-request-id": "embeds"})
    with pair.gateway.http() as other:
        assert other.post("/v1/requests/embeds/cancel").status_code == 200
    asking.join(20)
    check(answers[0], 409, code="cancelled")
    pair.wait_idle()


def test_given_a_time_limit_when_it_passes_then_504_and_the_engine_is_told(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 0
    before = len(pair.scheduler.cancelled)
    check(pair.post(PATH, {"input": "hello"}, **{"x-request-timeout": "0.2"}), 504, code="request_timeout")
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) > before)
    pair.wait_idle()


def test_given_a_client_that_leaves_when_it_waits_then_the_engine_is_told(pair: Pair) -> None:
    pair.scheduler.tokens_before_pause = 0
    before = len(pair.scheduler.cancelled)
    body = json.dumps({"input": ["hello", "fox"]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", pair.gateway.port)) as connection:
        connection.sendall(head.encode() + body)
        pair.scheduler.wait_for(lambda: len(pair.scheduler.live) == 2)
    pair.scheduler.wait_for(lambda: len(pair.scheduler.cancelled) >= before + 2)
    pair.wait_idle()


def test_given_a_scheduler_that_is_replaced_when_it_has_not_answered_then_the_next_one_does(pair: Pair) -> None:
    answers: list[httpx.Response] = []
    asking = in_background(pair, answers)
    pair.scheduler.restart()
    pair.scheduler.wait_for(lambda: len(pair.scheduler.live) == 2)
    pair.scheduler.tokens_before_pause = None
    asking.join(20)
    data = answers[0].json()["data"]
    assert [one["embedding"] for one in data] == [wanted(pair.tokenizer.encode(text)) for text in ("hello", "fox")]
    pair.wait_idle()
