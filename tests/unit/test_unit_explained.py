"""Why a request took so long: notes of several engines as one, and numbers as words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway import explained
from gateway.answers import chunks_of
from gateway.context import RequestInfo
from gateway.engine_metrics import ClientView
from gateway.explained import EXPLAINED_COUNTS, EXPLAINED_TIMES, ExplainedGeneration, summary_of
from gateway.generation import PromptState
from gateway.metrics import GatewayMetrics
from gateway.schemas import ChatRequest
from gateway.stream_record import StreamRecord
from novainfer.client.session import GatewaySession
from novainfer.client.stream import RequestStream
from novainfer.engine.gateways import GatewayLink
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    GATEWAY_SCHEMA,
    WAITED_BLOCKS,
    WAITED_ROWS,
    AddRequest,
    EngineInfo,
    Notes,
    OutputBatch,
    TokenOutput,
    Unlinked,
)
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer
from tests.fakes import write_tokenizer
from tests.unit.test_unit_link import Stream

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

READY = EngineInfo(epoch=1, ready=True, vocab_size=9)


class Gateway:
    """A session with one live request that asks, at time 0; `stream` is what its reader gets."""

    def __init__(self, *, explain: bool = True, n: int = 1) -> None:
        self.sent: list[Packet] = []
        self.session = GatewaySession(
            self.sent.append, lambda answer: None, gateway_id="g", first_link=10, lost_timeout=50.0, now=0.0
        )
        self.stream = Stream()
        self._link, self._number = 10, 0
        self.session.beat(0.0)
        self.hear(READY)
        request = AddRequest("r", [1, 2], SamplingParams(n=n, seed=1), explain=explain)
        self.session.submit([request], self.stream, 0.0)

    def hear(self, item: object, now: float = 0.0) -> None:
        self.session.take(Packet(self._link, self._number, item), now)
        self._number += 1

    def lose_scheduler(self, epoch: int, now: float) -> AddRequest:
        """Another one of this epoch is there; the request as it is sent to that."""
        self.session.take(Packet(self._link, 0, Unlinked(epoch)), now)
        self._link, self._number = self.sent[-1].link, 0
        self.hear(EngineInfo(epoch=epoch, ready=True, vocab_size=9), now)
        request = self.sent[-1].message
        assert isinstance(request, AddRequest)
        return request

    def notes(self) -> list[Notes | None]:
        return [item.notes for item in self.stream.items if isinstance(item, TokenOutput) and item.finish_reason]


def tokens(index: int, *ids: int, epoch: int = 1, end: Notes | None = None, notes: Notes | None = None) -> OutputBatch:
    output = TokenOutput("r", 0, index, list(ids), None if end is None else FINISH_LENGTH, notes=end)
    return OutputBatch(epoch, index, [output], notes=[] if notes is None else [notes])


def test_given_notes_when_they_travel_then_they_come_back_equal() -> None:
    notes = Notes("r", 1, 0.5, 2, 1, 30, WAITED_ROWS)
    for message in (tokens(0, 4, end=notes, notes=notes), AddRequest("r", [1], SamplingParams(), explain=True, ref=3)):
        assert GATEWAY_SCHEMA.decode(GATEWAY_SCHEMA.encode(message)) == message
    assert AddRequest("r", [1], SamplingParams(), explain=True).numbered(7).explain


def test_given_the_end_of_a_choice_when_it_comes_then_its_reader_gets_the_notes() -> None:
    gateway = Gateway()
    notes = Notes("r", 0, 0.5, 2, waited_for=WAITED_ROWS)
    gateway.hear(tokens(0, 4))
    gateway.hear(tokens(1, 5, end=notes))
    assert gateway.notes() == [notes]


def test_given_a_request_that_does_not_ask_when_it_ends_then_it_has_no_notes() -> None:
    gateway = Gateway(explain=False)
    gateway.hear(tokens(0, 4, notes=Notes("r", 0)))
    gateway.hear(EngineInfo(epoch=2, ready=False))
    gateway.session.cancel("r", complete=True)
    assert gateway.notes() == [None]


def test_given_a_stop_string_when_the_gateway_ends_a_choice_then_its_reader_gets_what_was_told_before() -> None:
    gateway = Gateway(n=2)
    told = Notes("r", 0, 0.25, 3, 1, 12, WAITED_BLOCKS)
    gateway.hear(tokens(0, 4, notes=told))
    gateway.session.cancel("r", complete=True)
    assert gateway.notes() == [told, Notes("r", 1)]
    assert [i.finish_reason for i in gateway.stream.items if isinstance(i, TokenOutput)][1:] == [FINISH_CANCELLED] * 2


def test_given_workers_that_are_replaced_when_a_choice_ends_then_each_time_counts_once() -> None:
    gateway = Gateway()
    for epoch in (2, 3):
        gateway.hear(EngineInfo(epoch=epoch, ready=False))
        gateway.hear(EngineInfo(epoch=epoch, ready=True, vocab_size=9))
    gateway.hear(tokens(0, 4, epoch=3, end=Notes("r", 0, 0.5, 1, recomputed_tokens=7)))
    assert gateway.notes() == [Notes("r", 0, 0.5, 1, recomputed_tokens=7, restarts=2)]


def test_given_a_scheduler_that_died_when_the_next_one_goes_on_then_counts_are_added_and_the_wait_is_the_first() -> (
    None
):
    gateway = Gateway()
    gateway.hear(tokens(0, 4, notes=Notes("r", 0, 0.25, 3, 1, 12, WAITED_BLOCKS)))
    again = gateway.lose_scheduler(2, now=9.0)
    assert (again.explain, again.emitted) == (True, [[4]])
    gateway.hear(tokens(1, 5, epoch=2, end=Notes("r", 0, 0.5, 0, 2, 3, WAITED_ROWS)))
    assert gateway.notes() == [Notes("r", 0, 0.25, 3, 3, 15, WAITED_BLOCKS, restarts=1)]


def test_given_a_scheduler_that_died_before_the_first_step_when_told_then_the_wait_is_that_at_both() -> None:
    gateway = Gateway()
    gateway.lose_scheduler(2, now=9.0)
    gateway.hear(tokens(0, 5, epoch=2, end=Notes("r", 0, 0.5, 1, waited_for=WAITED_ROWS)))
    assert gateway.notes() == [Notes("r", 0, 9.5, 1, waited_for=WAITED_ROWS, restarts=1)]


def test_given_an_engine_that_cannot_be_reached_at_first_when_told_then_the_wait_for_it_counts() -> None:
    gateway = Gateway(explain=False)
    gateway.hear(Unlinked(1))
    gateway.session.submit([AddRequest("s", [1, 2], SamplingParams(seed=1), explain=True)], gateway.stream, 4.0)
    again = gateway.lose_scheduler(2, now=9.0)
    assert (again.request_id, again.emitted) == ("s", [])
    end = TokenOutput("s", 0, 0, [5], FINISH_LENGTH, notes=Notes("s", 0, 0.5, 1))
    gateway.hear(OutputBatch(2, 1, [end]))
    assert gateway.notes() == [Notes("s", 0, 5.5, 1, restarts=1)]


def test_given_a_request_that_moves_when_another_engine_goes_on_then_that_counts_as_a_restart() -> None:
    one, other = Gateway(), Gateway(explain=False)
    one.hear(tokens(0, 4, notes=Notes("r", 0, 0.25, 1)))
    other.session.cancel("r")
    (moved,) = one.session.leave()
    other.session.adopt(moved, 3.0)
    other.hear(tokens(1, 5, end=Notes("r", 0, 0.1, 0, recomputed_tokens=2)))
    assert one.notes() == [Notes("r", 0, 0.25, 1, recomputed_tokens=2, restarts=1)]


def test_given_a_link_without_credit_when_there_is_some_again_then_the_last_notes_of_each_choice_come() -> None:
    packets: list[Packet] = []

    def send(packet: Packet) -> bool:
        packets.append(packet)
        return True

    link = GatewayLink(send, gateway_id="g", link=5, now=0.0, window=1)
    link.say(READY)
    for count in (1, 2):
        link.say(OutputBatch(1, count, [], notes=[Notes("r", 0, 0.5, count), Notes("r", 1, 0.5, 5 * count)]))
    link.acknowledge(1)
    batches = [packet.message for packet in packets if isinstance(packet.message, OutputBatch)]
    assert [notes for batch in batches for notes in batch.notes] == [Notes("r", 0, 0.5, 2), Notes("r", 1, 0.5, 10)]


# -- numbers --------------------------------------------------------------------------------------------------------


class Clocked:
    """A generation that began at 100 s and was handed to its engine at 101, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, n: int = 1) -> None:
        self.now = 101.0
        monkeypatch.setattr(explained, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.stream = RequestStream(["r"], lambda *_: None)
        self.generation = ExplainedGeneration(
            [PromptState("r", [5, 6, 7], SamplingParams(n=n, max_tokens=100, ignore_eos=True), [])],
            self.stream,
            tokenizer,
            GatewayMetrics("m", ClientView),
            engine=EngineInfo(1, True),
            info=RequestInfo("r", started=100.0),
            after_prompt=True,
        )

    def come(self, now: float, index: int, count: int = 1, choice: int = 0, end: Notes | None = None) -> None:
        self.now = now
        reason = None if end is None else FINISH_LENGTH
        ids = [20 + place for place in range(index, index + count)]
        self.stream.push(TokenOutput("r", choice, index, ids, reason, num_cached_tokens=2, notes=end))
        list(self.generation.take())

    def told(self) -> dict[str, Any]:
        told = self.generation.explanation()
        parts = ("gateway_ms", "queue_ms", "prefill_ms", "decode_ms")
        assert told["total_ms"] == pytest.approx(sum(told[name] for name in parts), abs=0.05)
        assert all(told[name] >= 0 for name in (*EXPLAINED_TIMES, *EXPLAINED_COUNTS))
        return told


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tiny")))


def test_given_tokens_of_one_choice_when_explained_then_each_part_of_the_time_is_told(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    clock = Clocked(monkeypatch, tokenizer)
    clock.come(104.0, 0)
    clock.come(105.0, 1)
    clock.come(108.5, 2, 3)
    clock.come(109.0, 5, end=Notes("r", 0, 2.5, 4, 1, 30, WAITED_BLOCKS, 2))
    told = clock.told()
    summary = told.pop("summary")
    assert summary.startswith("One pause between two tokens took 3.5 s; in the request's time the engine or its")
    assert told == {
        "total_ms": 9000.0,
        "gateway_ms": 1000.0,
        "queue_ms": 2500.0,
        "prefill_ms": 500.0,
        "decode_ms": 5000.0,
        "longest_gap_ms": 3500.0,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "generation_tokens": 6,
        "prefill_steps": 4,
        "preemptions": 1,
        "recomputed_tokens": 30,
        "restarts": 2,
        "waited_for": "kv_blocks",
    }


def test_given_two_choices_when_explained_then_times_are_from_the_first_token_of_all_and_counts_are_sums(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    clock = Clocked(monkeypatch, tokenizer, n=2)
    clock.come(103.0, 0, choice=1)
    clock.come(106.0, 0)
    clock.come(107.0, 1, choice=1, end=Notes("r", 1, 1.5, 2, 1, 5, WAITED_ROWS, 1))
    clock.come(108.0, 1, end=Notes("r", 0, 4.0, 3, 1, 7, WAITED_BLOCKS, 1))
    told = clock.told()
    assert [told[name] for name in ("queue_ms", "prefill_ms", "decode_ms")] == [1500.0, 500.0, 5000.0]
    assert told["longest_gap_ms"] == 4000.0
    assert [told[name] for name in ("prefill_steps", "preemptions", "recomputed_tokens")] == [
        3,
        2,
        12,
    ]  # steps: the most of one choice
    assert (told["restarts"], told["waited_for"], told["generation_tokens"]) == (1, "rows", 4)


@pytest.mark.parametrize("queue_seconds", [-1.0, 50.0])
def test_given_a_wait_that_is_unknown_or_longer_than_all_of_it_when_explained_then_the_parts_are_still_the_total(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, queue_seconds: float
) -> None:
    clock = Clocked(monkeypatch, tokenizer)
    clock.come(103.0, 0, end=Notes("r", 0, queue_seconds))
    told = clock.told()
    assert (told["queue_ms"], told["prefill_ms"]) == ((0.0, 2000.0) if queue_seconds < 0 else (2000.0, 0.0))
    assert (told["total_ms"], told["longest_gap_ms"], told["waited_for"]) == (3000.0, 0.0, None)


def test_given_no_token_when_explained_then_the_time_goes_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    clock = Clocked(monkeypatch, tokenizer)
    clock.come(105.0, 0, 0, end=Notes("r", 0, 3.0, waited_for=WAITED_ROWS))
    told = clock.told()
    assert [told[name] for name in ("total_ms", "queue_ms", "prefill_ms", "decode_ms")] == [5000.0, 3000.0, 1000.0, 0.0]


@pytest.mark.parametrize("notes", [None, Notes("r", 0, waited_for=WAITED_ROWS)])
def test_given_no_token_and_no_step_when_explained_then_all_of_it_was_waiting(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, notes: Notes | None
) -> None:
    clock = Clocked(monkeypatch, tokenizer)
    clock.come(105.0, 0, 0, end=notes)
    told = clock.told()
    assert [told[name] for name in ("total_ms", "queue_ms", "prefill_ms", "decode_ms")] == [5000.0, 4000.0, 0.0, 0.0]
    assert told["summary"].startswith("4.0 s of 5.0 s went into waiting for its first step")


def test_given_a_stream_that_asks_when_its_choice_is_plain_then_it_has_no_short_way(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    generation = Clocked(monkeypatch, tokenizer).generation
    ways = []
    for explain in (False, True):
        request = ChatRequest.model_validate({"messages": [{"role": "user"}], "stream": True, "explain": explain})
        chunks = chunks_of(generation, StreamRecord.of(request, "id", 1, "m", receipt=False), None)
        writer: Any = SimpleNamespace(write_part=None)
        ways.append(chunks.plain(generation.outputs[0], writer))
    assert [way is None for way in ways] == [False, True]


# -- words ----------------------------------------------------------------------------------------------------------


def numbers(**values: Any) -> dict[str, Any]:
    told = dict.fromkeys((*EXPLAINED_TIMES, *EXPLAINED_COUNTS), 0) | {"waited_for": None, **values}
    told["total_ms"] = sum(told[name] for name in ("gateway_ms", "queue_ms", "prefill_ms", "decode_ms"))
    return told


@pytest.mark.parametrize(
    ("told", "first", "second"),
    [
        ({"gateway_ms": 80.0, "decode_ms": 10.0}, "80 ms of 90 ms went into reading the request", ""),
        (
            {"queue_ms": 3000.0, "decode_ms": 1000.0, "generation_tokens": 9, "waited_for": "rows"},
            "3.0 s of 4.0 s went into waiting for its first step: all rows were taken (--max-num-seqs)",
            "Another 1.0 s went into generating 9 tokens",
        ),
        ({"queue_ms": 30.0}, "30 ms of 30 ms went into waiting for its first step", ""),
        (
            {"prefill_ms": 700.0, "decode_ms": 90.0, "prompt_tokens": 5000, "cached_tokens": 96, "prefill_steps": 3},
            "700 ms of 790 ms went into the prompt (4904 tokens in 3 steps; 96 more were cached)",
            "",
        ),
        (
            {"decode_ms": 900.0, "longest_gap_ms": 800.0, "generation_tokens": 50, "restarts": 1},
            "One pause between two tokens took 800 ms; in the request's time the engine or its workers were replaced "
            "(1 time)",
            "In all, 900 ms of 900 ms went into generating 50 tokens",
        ),
        (
            {"decode_ms": 900.0, "longest_gap_ms": 100.0, "generation_tokens": 50, "restarts": 2},
            "900 ms of 900 ms went into generating 50 tokens",
            "Of that, one pause between two tokens took 100 ms; in the request's time the engine or its workers were "
            "replaced (2 times)",
        ),
        (
            {
                "queue_ms": 900.0,
                "decode_ms": 500.0,
                "longest_gap_ms": 400.0,
                "preemptions": 2,
                "recomputed_tokens": 1,
                "generation_tokens": 5,
            },
            "900 ms of 1.4 s went into waiting for its first step",
            "Beside that, one pause between two tokens took 400 ms; in the request's time others had its place "
            "(2 preemptions), with 1 token computed again",
        ),
        (
            {"prefill_ms": 900.0, "restarts": 1, "prefill_steps": 1},
            "900 ms of 900 ms went into the prompt (0 tokens in 1 step; 0 more were cached); the engine or its workers "
            "were replaced meanwhile (1 time)",
            "",
        ),
        (
            {"prefill_ms": 900.0, "preemptions": 2, "prefill_steps": 3, "prompt_tokens": 17},
            "900 ms of 900 ms went into the prompt (17 tokens in 3 steps; 0 more were cached), with 2 preemptions",
            "",
        ),
        (
            {"queue_ms": 900.0, "restarts": 1},
            "900 ms of 900 ms went into waiting for its first step; the engine or its workers were replaced meanwhile "
            "(1 time)",
            "",
        ),
        ({"decode_ms": 3.0, "longest_gap_ms": 2.5, "generation_tokens": 3}, "3 ms of 3 ms went into generating 3", ""),
        ({}, "It took no time that could be measured", ""),
    ],
)
def test_given_numbers_when_spelled_then_the_largest_cause_comes_first(
    told: dict[str, Any], first: str, second: str
) -> None:
    sentences = summary_of(numbers(**told)).rstrip(".").split(". ")
    assert sentences[0].startswith(first)
    assert sentences[1:] == ([second] if second else [])
