"""`GET /v1/streams/{id}`: streams that a dead gateway has left behind, fetched from another one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.stream_record import PromptRecord, StreamRecord
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer
from novainfer.transport.addresses import Endpoint
from tests.chaos.streams import events
from tests.fakes import write_sentencepiece
from tests.online.conftest import Pair
from tests.online.gateways import GatewayThread, config_for
from tests.oracle import oracle_stream
from tests.replica import ReplicaThread

pytestmark = pytest.mark.stage2

PROMPT = list(range(10, 50))
LENGTH = 24


class Server:
    """A gateway and the scheduler behind it."""

    def __init__(self, model: Path, run_dir: Path) -> None:
        self.vocab_size = Tokenizer.load(model).vocab_size
        endpoint = Endpoint(f"ipc://{run_dir}/scheduler-0.gateways")
        self.scheduler = ReplicaThread(endpoint, vocab_size=self.vocab_size)
        self.gateway = GatewayThread(config_for(model), endpoint)
        self.gateway.wait_ready()

    def close(self) -> None:
        self.scheduler.group.paused.clear()
        self.gateway.close()
        self.scheduler.close()

    def fetch(self, after: str = "", key: str = "mine", **headers: str) -> httpx.Response:
        with self.gateway.http(**headers) as http:
            return http.get(f"/v1/streams/{key}", params={"after": after} if after else {})

    def tokens(self, sent: AddRequest) -> list[int]:
        return oracle_stream(sent.prompt_token_ids, sent.params, 0, (), self.vocab_size)

    def kept_until(self) -> list[float]:
        """When the orphans' time is over, and nobody has claimed them."""
        return [orphan.until for orphan in self.scheduler.replica._orphans._entries.values() if not orphan.claimant]


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(tiny_model, tmp_path)
    yield running
    running.close()


def stream_of(
    response_id: str = "cmpl-1", seed: int = 1, *, is_chat: bool = False, prompt_alone: bool = False, **fields: Any
) -> AddRequest:
    """A stream of text completions, or of a chat that goes on from its last message, as a gateway sends it."""
    record = StreamRecord(
        is_chat=is_chat, response_id=response_id, created=1, model="m", include_usage=True, continuous_usage=False,
        event_ids=True, token_ids=True, logprobs=False, echo=prompt_alone, receipt=False, after_prompt=True,
        prompt_alone=prompt_alone, explain=fields.get("explain", False),
    )  # fmt: skip
    request = AddRequest(
        f"{response_id}-0",
        PROMPT,
        SamplingParams(seed=seed, max_tokens=1 if prompt_alone else LENGTH, ignore_eos=True),
        aliases=[response_id, "mine"],
        answer=PromptRecord(record, 0, 1, "as it was" if prompt_alone else "").to_json(),
    )
    return replace(request, **fields)


def read(response: httpx.Response) -> tuple[list[int], list[str], dict[str, Any]]:
    """Token ids, finish reasons, usage."""
    assert response.status_code == 200, response.text
    chunks = [json.loads(data) for _, data in events(iter(response.text.split("\n"))) if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids") or []]
    return ids, [c["finish_reason"] for c in choices if c["finish_reason"]], chunks[-1]["usage"]


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_given_head_when_asked_then_it_is_refused_and_the_stream_can_still_be_fetched(server: Server) -> None:
    sent = stream_of()
    server.scheduler.leave_behind(sent, num_tokens=LENGTH)
    with server.gateway.http() as http:
        refused = http.head("/v1/streams/mine")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert read(server.fetch())[:2] == (server.tokens(sent), ["length"])


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize(("after", "text"), [("0", "as it was"), ("1", "")])
def test_given_a_prompt_that_is_told_alone_when_fetched_then_nothing_is_told_of_the_engines_token(
    server: Server, num_tokens: int, after: str, text: str
) -> None:
    server.scheduler.leave_behind(stream_of(prompt_alone=True), num_tokens=num_tokens)
    response = server.fetch(after=after)
    ids, reasons, usage = read(response)
    assert (ids, reasons, usage["completion_tokens"]) == ([], ["length"], 0)
    chunks = [json.loads(data) for _, data in events(iter(response.text.split("\n"))) if data != "[DONE]"]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text


def test_given_several_clients_when_they_fetch_one_stream_at_once_then_one_gets_it_and_the_others_are_told(
    server: Server,
) -> None:
    sent = stream_of()
    server.scheduler.group.paused.set()
    server.scheduler.leave_behind(sent)
    with ThreadPoolExecutor(4) as pool:
        fetched = [pool.submit(server.fetch) for _ in range(4)]
        server.scheduler.wait_for(lambda: sum(future.done() for future in fetched) == 3)
        others = [future.result() for future in fetched if future.done()]
        server.scheduler.group.paused.clear()
    assert [code(other) for other in others] == [(409, "stream_in_use")] * 3
    (one,) = [future.result() for future in fetched if future.result() not in others]
    assert read(one)[:2] == (server.tokens(sent), ["length"])


@pytest.mark.parametrize("has_ended", [True, False])
def test_given_what_is_no_event_when_asked_for_then_it_is_refused_and_the_stream_waits_as_long_as_before(
    server: Server, has_ended: bool
) -> None:
    sent = stream_of()
    if not has_ended:
        server.scheduler.group.paused.set()
    server.scheduler.leave_behind(sent, num_tokens=LENGTH * has_ended)
    until = server.kept_until()
    for after in ("nonsense", "1-1", f"{LENGTH + 4}", "999999999"):
        assert server.fetch(after).json()["error"]["param"] == "after"
        server.scheduler.wait_for(lambda: server.kept_until() == until)
    server.scheduler.group.paused.clear()
    assert read(server.fetch(f"{LENGTH - 1}"))[:2] == (server.tokens(sent)[LENGTH - 2 :], ["length"])


def test_given_a_stream_that_ended_early_when_a_later_event_is_asked_for_then_it_is_refused(server: Server) -> None:
    params = SamplingParams(seed=1, max_tokens=LENGTH, ignore_eos=True)
    stop = oracle_stream(PROMPT, params, 0, (), server.vocab_size)[5]
    sent = stream_of(params=replace(params, stop_token_ids=(stop,)))
    num_tokens = len(oracle_stream(PROMPT, sent.params, 0, (stop,), server.vocab_size))
    server.scheduler.leave_behind(sent, num_tokens=num_tokens)
    assert server.fetch(f"{num_tokens + 4}").status_code == 400
    assert read(server.fetch(f"{num_tokens + 3}"))[:2] == ([], [])


def test_given_two_streams_of_one_request_id_when_fetched_by_it_then_that_is_said_and_each_has_its_own(
    server: Server,
) -> None:
    both = [stream_of("cmpl-1", 1), stream_of("cmpl-2", 2)]
    server.scheduler.leave_behind(*both, num_tokens=LENGTH)
    until = server.kept_until()
    assert code(server.fetch()) == (409, "stream_ambiguous")
    server.scheduler.wait_for(lambda: server.kept_until() == until)
    for sent, key in zip(both, ("cmpl-1", "cmpl-2"), strict=True):
        assert read(server.fetch(key=key))[0] == server.tokens(sent)


def test_given_a_part_of_a_stream_when_fetched_then_it_is_not_found_and_given_back(server: Server) -> None:
    sent = stream_of()
    part = replace(sent, answer=sent.answer.replace('"count":1', '"count":2'))
    server.scheduler.leave_behind(part, num_tokens=LENGTH)
    assert code(server.fetch()) == (404, "stream_not_found")
    server.scheduler.wait_for(lambda: len(server.kept_until()) == 1)


def test_given_a_client_that_leaves_while_its_stream_is_claimed_when_another_asks_then_it_gets_it(
    server: Server,
) -> None:
    sent = stream_of()
    server.scheduler.leave_behind(sent, num_tokens=LENGTH)
    replica, answers = server.scheduler.replica, []
    claim = replica._claim

    def late(*arguments: Any) -> Any:
        """The client is gone by the time that the scheduler answers."""
        if not answers:
            connection.close()
            while server.gateway.server.server_state.connections:
                time.sleep(0.001)  # this is the thread that tells of changes
        answers.append(claim(*arguments))
        return answers[-1]

    replica._claim = late  # type: ignore[method-assign]
    with socket.create_connection(("127.0.0.1", server.gateway.port)) as connection:
        connection.sendall(b"GET /v1/streams/mine HTTP/1.1\r\nHost: x\r\n\r\n")
        server.scheduler.wait_for(lambda: bool(answers) and len(server.kept_until()) == 1)
    assert read(server.fetch())[0] == server.tokens(sent)


def test_given_a_claim_that_was_lost_when_another_gateway_has_sent_the_stream_then_it_is_in_use(server: Server) -> None:
    server.scheduler.group.paused.set()
    sent = stream_of()
    server.scheduler.leave_behind(sent)
    replica = server.scheduler.replica
    claim = replica._claim

    def lose(*arguments: Any) -> Any:
        """As if the link had ended with the answer on its way, and another gateway had been quicker."""
        answer = claim(*arguments)
        replica._owner[sent.request_id] = b"another"
        return answer

    replica._claim = lose  # type: ignore[method-assign]
    assert code(server.fetch()) == (409, "stream_in_use")
    del replica._owner[sent.request_id]


@pytest.mark.parametrize(("deadline", "headers"), [(1.5, {}), (0.0, {"x-request-timeout": "0.5"})])
def test_given_a_time_limit_when_it_passes_on_a_fetched_stream_then_that_is_said(
    server: Server, deadline: float, headers: dict[str, str]
) -> None:
    server.scheduler.group.paused.set()
    server.scheduler.leave_behind(stream_of(deadline=deadline))
    assert code(server.fetch(**headers)) == (504, "request_timeout")


def test_given_a_time_limit_that_has_passed_when_fetched_then_that_is_said_and_nothing_is_claimed(
    server: Server,
) -> None:
    server.scheduler.leave_behind(stream_of(deadline=0.9), num_tokens=LENGTH)
    assert code(server.fetch()) == (504, "request_timeout")
    server.scheduler.wait_for(lambda: len(server.kept_until()) == 1)


def test_given_a_prompt_that_was_cached_when_its_stream_is_fetched_then_usage_is_as_it_was(server: Server) -> None:
    body = {"prompt": PROMPT, "seed": 1, "max_tokens": LENGTH, "ignore_eos": True}
    with server.gateway.http() as http:
        http.post("/v1/completions", json={**body, "max_tokens": 1})
        usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32
    server.scheduler.leave_behind(stream_of(), num_tokens=LENGTH)
    assert read(server.fetch("5"))[2] == usage


def test_given_a_stream_whose_end_is_not_in_the_kernel_yet_when_the_engine_has_ended_it_then_it_is_kept(
    pair: Pair,
) -> None:
    """The gateway's buffers die with it: told is what the kernel has."""
    listener = pair.gateway.listener
    before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    told = pair.scheduler.told
    body = json.dumps({"prompt": "x", "max_tokens": 60, "logprobs": 20, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", pair.gateway.port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        pair.scheduler.wait_for(lambda: bool(pair.scheduler.added) and not pair.scheduler.live)
        (slow,) = pair.scheduler.added
        quick = pair.post("/v1/completions", {"prompt": "y", "max_tokens": 1, "stream": True})
        assert quick.status_code == 200
        pair.scheduler.wait_for(lambda: pair.scheduler.added[-1].request_id in told)
        assert slow.request_id not in told
        read_all = b""
        while part := client.recv(65536):
            read_all += part
    assert b"[DONE]" in read_all
    pair.scheduler.wait_for(lambda: slow.request_id in told)


def test_given_a_chat_that_goes_on_from_its_last_message_when_its_stream_is_fetched_then_the_first_space_is_there(
    tmp_path: Path,
) -> None:
    model = write_sentencepiece(tmp_path / "model", ["▁hello"])
    server = Server(model, tmp_path)
    try:
        hello = Tokenizer.load(model).token_id("▁hello")
        sent = next(s for s in (stream_of(is_chat=True, seed=i) for i in count()) if server.tokens(s)[0] == hello)
        sent = replace(sent, params=replace(sent.params, max_tokens=1))
        server.scheduler.leave_behind(sent, num_tokens=1)
        text = server.fetch().text
    finally:
        server.close()
    assert '"content":" hello"' in text


def test_given_a_stream_that_asks_why_when_fetched_then_it_tells_what_this_gateway_saw(server: Server) -> None:
    sent = stream_of(explain=True)
    server.scheduler.leave_behind(sent, num_tokens=3)
    response = server.fetch(after="2")
    ids, _, usage = read(response)
    assert ids == server.tokens(sent)[1:]
    (told,) = [json.loads(data)["explain"] for _, data in events(iter(response.text.split("\n"))) if "explain" in data]
    parts = [told[name] for name in ("gateway_ms", "queue_ms", "prefill_ms", "decode_ms")]
    assert told["total_ms"] == pytest.approx(sum(parts), abs=0.05)
    assert min(parts) >= 0
    assert told["generation_tokens"] == usage["completion_tokens"] == LENGTH
