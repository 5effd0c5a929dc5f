"""Streams of every kind, read to their ends by threads, so that what came can be compared with what should come."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.servers import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LENGTH = 160
RETRY_SECONDS = (
    0.1  # nobody tells a client when a port is open again; one that asks all the time takes the server's cores
)
_ALWAYS = {
    "stream": True,
    "stream_options": {"include_usage": True, "include_event_ids": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "max_tokens": LENGTH,
}


def _chat(text: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "ignore_eos": True, **options}


def _completion(text: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": text, "ignore_eos": True, **options}


# Of so many words that an answer has no end before `LENGTH`.
_WORDS = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 50}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": _WORDS}}
REQUESTS = [
    _chat("What is NovaInfer?", temperature=0, logprobs=True, top_logprobs=2),
    _chat("Hello!", temperature=1.0, seed=3, n=3, top_p=0.95),
    _chat("Spell the word river.", temperature=0.8, seed=8, presence_penalty=0.5, frequency_penalty=0.3),
    _chat("Count from 3 to 9.", temperature=1.2, seed=5, stop=["zq", "xj"], top_k=50, logprobs=True),
    _chat("What is 23 plus 45?", temperature=0, ignore_eos=False, min_tokens=120),
    _completion("NovaInfer is a server", temperature=0, echo=True, logprobs=1),
    _completion("One, two, three", temperature=1.0, seed=21, prompt_logprobs=1, repetition_penalty=1.1, stream=False),
    _completion("A" * 200, temperature=0.9, seed=13, n=2, min_p=0.01),
    _chat("Give me JSON.", temperature=1.0, seed=6, n=2, response_format=_FORMAT, frequency_penalty=0.2),
]


@dataclass
class Answer:
    """One stream, put together again: by choice what it said, and what it said of the whole."""

    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)  # fields of a chunk or choice that come once: prompt logprobs
    usage: dict[str, Any] = field(default_factory=dict)  # as told last, without what was cached
    # Told with every event, by whichever gateway. What others have cached is not the same in every run.
    num_cached_tokens: int | None = field(default=None, compare=False)
    error: str | None = None
    is_done: bool = False

    def take(self, data: str) -> int:
        """Add one event; the number of tokens in it."""
        if data == "[DONE]":
            self.is_done = True
            return 0
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return 0
        if chunk.get("usage"):
            cached = chunk["usage"].pop("prompt_tokens_details")["cached_tokens"]
            assert self.num_cached_tokens in (None, cached), "another number of cached tokens"
            self.usage, self.num_cached_tokens = chunk["usage"], cached
        return sum(self._take_choice(choice) for choice in chunk["choices"])

    def _take_choice(self, choice: dict[str, Any]) -> int:
        index = choice["index"]
        assert index not in self.finish_reasons, "something came after the finish reason"
        self.text[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        self.token_ids[index] += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            self.logprobs[index] += logprobs["content"] or []
        elif logprobs:
            self.logprobs[index] += zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            )
        if choice.get("prompt_logprobs"):
            self.others.append(choice["prompt_logprobs"])
        if choice.get("finish_reason"):
            self.finish_reasons[index] = choice["finish_reason"]
        return len(choice.get("token_ids") or [])


def events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(id, data) of each event that came whole."""
    event_id = data = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield event_id, data
            event_id = data = ""


def read(server: RunningServer, path: str, body: dict[str, Any], told: Callable[[str, int], None]) -> Answer:
    """One request to its end. `told` hears of its life: ("sent" | "accepted" | "event" | "resumed", tokens)."""
    answer = Answer()
    body = {**_ALWAYS, **body}
    told("sent", 0)
    try:
        if body["stream"]:
            _read_stream(server, answer, path, body, told)
        else:
            del body["stream_options"]
            with server.http() as http:
                told("event", answer.take(http.post(path, json=body).text))
            answer.is_done = True
    except httpx.TransportError as error:
        answer.error = repr(error)
    return answer


def told_nobody(what: str, tokens: int) -> None:
    """For `read`, where nobody wants to hear of it."""


def read_all(server: RunningServer, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Answer]:
    """What a server says that nothing happens to. Raises RuntimeError if one of them fails."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda request: read(server, *request, told_nobody), requests))
    failed = [answer.error for answer in answers if not answer.is_done or answer.error]
    if failed:
        raise RuntimeError(f"the undisturbed server failed: {failed[0]}")
    return answers


def _read_stream(
    server: RunningServer, answer: Answer, path: str, body: dict[str, Any], told: Callable[[str, int], None]
) -> None:
    """To its end; if the connection is lost, the rest is fetched from whoever listens at the port then."""
    request_id, place = f"chaos-{secrets.token_hex(8)}", ""
    post = {"json": body, "headers": {"x-request-id": request_id, "x-request-timeout": "600"}}
    method, url, sent = "POST", path, post
    while True:
        try:
            with server.http() as http, http.stream(method, url, **sent) as reply:  # type: ignore[arg-type]
                if reply.status_code == 404 and method == "GET" and not place:
                    method, url, sent = "POST", path, post
                    continue  # it was never accepted
                if reply.status_code != 200:
                    answer.error = f"{method}: {reply.status_code} {reply.read().decode()}"
                    return
                told("accepted", 0)
                for event_id, data in events(reply.iter_lines()):
                    told("event", answer.take(data))
                    place = event_id or place
            return
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError) as error:
            assert server.process.poll() is None, server.errors
            if isinstance(error, httpx.ConnectError):
                time.sleep(RETRY_SECONDS)
            told("resumed", 0)
            method, url, sent = "GET", f"/v1/streams/{request_id}", {"params": {"after": place}}


class Streams:
    """All of these requests, running at once. Use as a context manager; `answers` waits for their ends."""

    def __init__(self, server: RunningServer, requests: Sequence[tuple[str, dict[str, Any]]] = REQUESTS) -> None:
        self._server = server
        self._requests = requests
        self._counts = [0] * len(requests)
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(len(requests))
        self.num_resumed = 0
        self._futures: list[Future[Answer]] = []

    def __enter__(self) -> Streams:
        self._futures = [self._pool.submit(self._read, number) for number in range(len(self._requests))]
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def wait_tokens(self, more: int) -> None:
        """Block until the streams have got so many more tokens, all together."""
        with self._changed:
            wanted = sum(self._counts) + more
            self._changed.wait_for(lambda: sum(self._counts) >= wanted)

    def wait_all_have_begun(self) -> None:
        """Block until each stream has got a token."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._counts))

    def answers(self) -> list[Answer]:
        """What came, in the order of the requests."""
        return [future.result() for future in self._futures]

    def _read(self, number: int) -> Answer:
        path, body = self._requests[number]
        if not body.get("stream", True):
            self._count(number, 1)  # it says nothing before its end
        try:
            return read(self._server, path, body, lambda what, tokens: self._told(number, what, tokens))
        finally:
            self._count(number, 1_000_000)  # whoever waits for tokens of this one shall not wait for ever

    def _told(self, number: int, what: str, tokens: int) -> None:
        self.num_resumed += what == "resumed"
        self._count(number, tokens)

    def _count(self, number: int, tokens: int) -> None:
        with self._changed:
            self._counts[number] += tokens
            self._changed.notify_all()


def run(
    server: RunningServer,
    disturb: Callable[[Streams], None],
    requests: Sequence[tuple[str, dict[str, Any]]] = REQUESTS,
) -> list[Answer]:
    """All requests at once; `disturb` is called while they run."""
    with Streams(server, requests) as streams:
        streams.wait_all_have_begun()
        disturb(streams)
        return streams.answers()
