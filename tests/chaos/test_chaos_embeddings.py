"""Processes of a real server die while texts are embedded: clients see a pause, and then the very same vectors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.chaos.blows import KILL, strike, wait_replaced
from tests.servers import RunningServer

pytestmark = [pytest.mark.stage2, pytest.mark.timeout(600)]

INPUTS = [[3 + (7 * i + j * j) % 600 for j in range(300 + 40 * i)] for i in range(24)]
NUM_CLIENTS = 3
Answers = list[list[list[float]]]


class Clients:
    """Ask for the same vectors again and again, without the prefix cache: each of them has to be computed."""

    def __init__(self, server: RunningServer) -> None:
        self.answers: Answers = []
        self.faults: list[BaseException] = []
        self._server = server
        self._is_over = threading.Event()
        self._news = threading.Condition()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._is_over.is_set() and not self.faults:
            try:
                vectors = embed(self._server)
            except BaseException as error:
                self.faults.append(error)
            with self._news:
                if not self.faults:
                    self.answers.append(vectors)
                self._news.notify_all()

    def wait_answers(self, count: int) -> None:
        """Block until so many more have come."""
        with self._news:
            wanted = len(self.answers) + count
            assert self._news.wait_for(lambda: self.faults or len(self.answers) >= wanted, timeout=120)

    def close(self) -> None:
        """No more are sent; those that were are answered."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def embed(server: RunningServer) -> list[list[float]]:
    body = {"input": INPUTS, "prefix_cache": False}
    with server.http() as http:
        answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_given_texts_being_embedded_when_workers_and_scheduler_die_then_every_vector_is_the_same(
    ranks: str, start_server: Callable[..., RunningServer]
) -> None:
    server = start_server("-tp", ranks)
    undisturbed = embed(server)
    clients = Clients(server)
    try:
        clients.wait_answers(2)
        for title in ("worker 0.0", "scheduler 0", f"worker 0.{int(ranks) - 1}"):
            old = strike(server, title, KILL)
            wait_replaced(server, title, old)
            clients.wait_answers(NUM_CLIENTS + 1)  # at least one of them was sent after the blow
    finally:
        clients.close()
    assert not clients.faults
    assert len(clients.answers) > 3 * NUM_CLIENTS
    assert all(answer == undisturbed for answer in clients.answers)
    server.wait_until_nothing_is_held()
