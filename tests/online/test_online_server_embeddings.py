"""`/v1/embeddings` of a real server: the vectors of the offline `LLM`, in any company, and figures that add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from novainfer import LLM
from tests.conservation import PATIENCE, at_rest, scrape
from tests.servers import RunningServer

pytestmark = pytest.mark.stage2

TEXTS = ["The gateway", "What is NovaInfer?", "the sea was calm. " * 40, "a", "The gateway holds the journal."]
CONTEXT = 2048


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


@pytest.fixture(scope="module")
def offline() -> list[list[float]]:
    with LLM("demo", num_blocks=256, max_num_seqs=1) as llm:
        return [llm.embed(text, use_tqdm=False)[0]["embedding"] for text in TEXTS]


def embed(sdk: openai.OpenAI, texts: list[str], **options: Any) -> list[list[float]]:
    return [one.embedding for one in sdk.embeddings.create(model="demo", input=texts, **options).data]


def test_given_texts_when_embedded_by_the_sdk_then_each_is_that_of_the_offline_llm_in_both_formats(
    sdk: openai.OpenAI, offline: list[list[float]]
) -> None:
    assert embed(sdk, TEXTS) == offline
    assert embed(sdk, TEXTS, encoding_format="float") == offline
    assert embed(sdk, TEXTS[::-1]) == offline[::-1]
    assert embed(sdk, TEXTS[3:4]) == offline[3:4]
    (cut,) = embed(sdk, TEXTS[:1], dimensions=16)
    assert len(cut) == 16


def test_given_chats_beside_them_when_embedded_by_many_then_each_bit_is_the_same(
    server: RunningServer, sdk: openai.OpenAI, offline: list[list[float]]
) -> None:
    chat = {"model": "demo", "prompt": TEXTS[2], "max_tokens": 40, "temperature": 0.0}
    alone = sdk.completions.create(**chat).choices[0].text  # type: ignore[call-overload]
    found: list[list[list[float]]] = []
    told: list[str] = []

    def ask_vectors() -> None:
        with server.sdk() as client:
            found.extend(embed(client, TEXTS) for _ in range(5))

    def ask_text() -> None:
        with server.sdk() as client:
            told.extend(client.completions.create(**chat).choices[0].text for _ in range(3))  # type: ignore[call-overload]

    threads = [threading.Thread(target=target) for target in (ask_vectors, ask_text) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [offline] * 20
    assert told == [alone] * 12


def test_given_inputs_up_to_the_context_when_embedded_then_there_is_room_and_beyond_it_400(
    server: RunningServer,
) -> None:
    with server.http() as http:
        whole = http.post("/v1/embeddings", json={"input": [[7] * CONTEXT, [7]]})
        beyond = http.post("/v1/embeddings", json={"input": [7] * (CONTEXT + 1)})
    assert whole.json()["usage"] == {"prompt_tokens": CONTEXT + 1, "total_tokens": CONTEXT + 1}
    assert whole.headers["x-novainfer-mode"].endswith("exact")
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_given_strict_parameters_keys_and_quotas_when_embedded_then_they_count_as_for_any_request(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red:key-red\nblue:key-blue tokens-per-minute=200\n")
    flags = ("--replicas", "2", "--num-gateways", "2", "--api-key-file", str(keys), "--strict-params")
    server = start_server(*flags)
    red, blue = {"x-api-key": "key-red"}, {"x-api-key": "key-blue"}
    with server.http() as http:

        def post(headers: dict[str, str], **body: Any) -> httpx.Response:
            return http.post("/v1/embeddings", json={"input": TEXTS, **body}, headers=headers)

        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 401
        refused = post(red, metadata={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
        vectors = {str(post(red, cache_salt=str(i)).json()["data"]) for i in range(6)}  # on either replica
        assert len(vectors) == 1
        num_tokens = post(red).json()["usage"]["prompt_tokens"]
        answers = [post(blue, input=[7] * 90) for _ in range(8)]  # each gateway has its part of the limit
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    num_good = 7 + statuses.count(200)
    num_choices = 7 * len(TEXTS) + statuses.count(200)
    deadline = time.monotonic() + PATIENCE
    while any(scrape(server, red)["choices_accepted_total"] != num_choices for _ in range(8)):
        assert time.monotonic() < deadline  # each gateway hears of the engines several times a second
    for now in at_rest(server, num_good, **red):
        now.check_engines()
        now.check_gateways()
        assert now["requests_begun_total"] == now.of("requests_ended_total", "finished") == num_good
        assert now["choices_accepted_total"] == now["choices_finished_total"] == num_choices
        assert now["generation_tokens_total"] == now["gateway_tokens_received_total"] == 0
        assert now.of("tenant_prompt_tokens_total", "red") == 7 * num_tokens
        assert now["request_queue_time_seconds_count"] == now["choices_accepted_total"]
        assert now["request_inference_time_seconds_count"] == now["request_decode_time_seconds_count"]
        assert now["time_to_first_token_seconds_count"] == 0


def test_given_ranks_that_compute_nothing_when_embedded_then_there_is_an_answer(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server("--executor", "null")
    with server.sdk() as client:
        assert [len(vector) for vector in embed(client, TEXTS[:2])] == [256, 256]
