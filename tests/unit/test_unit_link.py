"""The scheduler's links: to gateways (numbers, gaps, credit), and to ranks (what gets lost)."""

from __future__ import annotations

import random

import pytest

from novainfer.client.session import Answer, GatewaySession
from novainfer.client.stream import StreamItem
from novainfer.engine import gateways
from novainfer.engine.gateways import GatewayLink
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError, ProtocolError
from novainfer.executor.base import ExecutorInfo
from novainfer.executor.rank import RankSession
from novainfer.executor.ranks import RankGroup
from novainfer.protocol.columns import column
from novainfer.protocol.link import Inbox, Packet, packets_in
from novainfer.protocol.messages import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    AddRequest,
    CancelRequest,
    Claimed,
    ClaimRequest,
    EngineInfo,
    EngineStats,
    Heartbeat,
    Hello,
    OutputBatch,
    ReleaseClaim,
    RequestRejected,
    TokenOutput,
    Told,
    Unlinked,
)
from novainfer.protocol.step import Adopt, StepPlan, StepResult, WorkerHello
from novainfer.sampling.params import SamplingParams
from novainfer.scheduler.request import make_request

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

READY = EngineInfo(epoch=1, ready=True, vocab_size=9)
STATS = EngineStats(1, 0, 0, 0, 8, 8)


def message(request_id: str = "r", n: int = 1, **fields: object) -> AddRequest:
    return AddRequest(request_id, [1, 2], SamplingParams(n=n, seed=1), **fields)  # type: ignore[arg-type]


def batch(index: int, *ids: int, epoch: int = 1, choice: int = 0, end: str | None = None) -> OutputBatch:
    return OutputBatch(epoch, index, [TokenOutput("r", choice, index, list(ids), end)])


# -- numbers --------------------------------------------------------------------------------------------------------


def test_given_packets_in_order_when_taken_then_each_is_new_once() -> None:
    inbox = Inbox()
    assert [inbox.is_new(number) for number in (0, 0, 1, 0, 2, 1)] == [True, False, True, False, True, False]
    assert inbox.num_taken == 3


def test_given_a_gap_when_taken_then_it_is_an_error_and_nothing_counts_as_taken() -> None:
    inbox = Inbox()
    inbox.is_new(0)
    with pytest.raises(ProtocolError, match="packets 1 to 2 are lost"):
        inbox.is_new(3)
    assert inbox.num_taken == 1
    assert inbox.is_new(1)


def test_given_a_packet_when_it_goes_over_the_wire_then_it_comes_back_equal() -> None:
    packet = Packet(2**60, 7, Heartbeat(3), 2**61)
    assert Packet.of(packet.frames()) == packet


def test_given_several_packets_in_one_message_when_one_is_broken_then_those_before_it_are_read() -> None:
    packets = [Packet(9, number, Heartbeat(number)) for number in range(3)]
    frames = [frame for packet in packets for frame in packet.frames()]
    assert list(packets_in(frames)) == packets
    found = packets_in([*frames[:2], b"?", *frames[3:]])
    assert next(found) == packets[0]
    for broken in (found, packets_in([]), packets_in(frames[:1])):
        with pytest.raises(ProtocolError):
            next(broken)


@pytest.mark.parametrize("frames", [[], [b"x" * 24], [b"x" * 23, b""], [b"x" * 24, b"\xc1"], [b"x" * 24, b"", b""]])
def test_given_what_is_no_packet_when_read_then_it_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Packet.of(frames)


# -- the scheduler's end --------------------------------------------------------------------------------------------


class Sent:
    """A link with a window of 2, and what it has sent."""

    def __init__(self, window: int = 2) -> None:
        self.packets: list[Packet] = []
        self.is_there = True
        self.link = GatewayLink(self._send, gateway_id="g", link=5, now=0.0, window=window)

    def _send(self, packet: Packet) -> bool:
        self.packets.append(packet)
        return self.is_there

    def messages(self) -> list[object]:
        taken, self.packets = self.packets, []
        return [packet.message for packet in taken]


def test_given_credit_when_something_is_said_then_it_goes_at_once_with_its_number() -> None:
    sent = Sent()
    sent.link.say(READY)
    sent.link.say(batch(0, 4))
    assert sent.packets == [Packet(5, 0, READY), Packet(5, 1, batch(0, 4))]


def test_given_no_credit_when_tokens_are_said_then_they_wait_and_come_as_one_batch() -> None:
    sent = Sent(window=1)
    sent.link.say(READY)
    sent.link.say(batch(0, 4))
    sent.link.say(batch(1, 5, 6, end=FINISH_LENGTH))
    assert sent.messages() == [READY]
    sent.link.acknowledge(1)
    (merged,) = sent.messages()
    assert isinstance(merged, OutputBatch)
    assert [(o.index, o.token_ids, o.finish_reason) for o in merged.outputs] == [(0, [4, 5, 6], FINISH_LENGTH)]
    sent.link.acknowledge(2)
    assert sent.messages() == []


def test_given_held_tokens_when_workers_are_lost_then_the_tokens_come_before_the_newer_epoch() -> None:
    """The gateway drops tokens of an older epoch than the one it was told of: these would be lost without a gap."""
    sent = Sent(window=1)
    sent.link.say(READY)
    sent.link.say(batch(0, 4))
    sent.link.say(EngineInfo(epoch=2, ready=False))
    sent.messages()
    sent.link.acknowledge(1)
    assert [type(item) for item in sent.messages()] == [OutputBatch, EngineInfo]


def test_given_no_credit_when_a_beat_is_due_then_it_goes_all_the_same() -> None:
    """If all that had credit was lost, only a later packet shows the gap; without one the link stands for ever."""
    sent = Sent(window=1)
    sent.link.say(READY)
    sent.link.beat(STATS)
    assert sent.messages() == [READY, STATS]


def test_given_a_word_of_packets_that_were_never_sent_when_it_comes_then_it_is_an_error() -> None:
    sent = Sent()
    sent.link.say(READY)
    with pytest.raises(ProtocolError, match="2 packets were taken of 1"):
        sent.link.acknowledge(2)


def test_given_an_older_acknowledgement_when_it_comes_late_then_credit_does_not_shrink() -> None:
    sent = Sent(window=2)
    for _ in range(2):
        sent.link.say(READY)
    sent.link.acknowledge(2)
    sent.link.acknowledge(1)
    sent.link.say(batch(0, 4))
    sent.link.say(batch(1, 5))
    assert len(sent.packets) == 4


def test_given_a_peer_that_cannot_be_reached_once_when_it_can_again_then_the_link_stays_unreachable() -> None:
    sent = Sent(window=9)
    sent.is_there = False
    sent.link.say(READY)
    sent.is_there = True
    sent.link.say(READY)
    assert not sent.link.is_reachable


def test_given_a_stream_that_has_ended_when_its_reader_has_all_then_it_is_not_kept() -> None:
    sent = Sent(window=1)
    sent.link.live = {
        name: make_request(message(name, answer="a stream" * (name == "s")), 0, 0.0) for name in ("r", "s")
    }
    for name in ("r", "s"):
        sent.link.say(OutputBatch(1, 1, [TokenOutput(name, 0, 0, [3], FINISH_LENGTH)]))
        sent.link.ended(name)
    assert list(sent.link.untold) == ["s"]
    sent.link.acknowledge(1)
    assert list(sent.link.untold) == ["s"]
    sent.link.told("s")
    assert sent.link.untold == {}
    assert sent.link.live == {}


# -- the gateway's end ----------------------------------------------------------------------------------------------


class Stream:
    """A sink."""

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.ends: list[Exception | None] = []

    def push(self, item: StreamItem) -> None:
        self.items.append(item)

    def push_token(self, request_id: str, choice: int, index: int, token_id: int) -> None:
        self.items.append(TokenOutput(request_id, choice, index, [token_id]))

    def end(self, request_id: str, error: Exception | None = None) -> None:
        self.ends.append(error)

    def tokens(self) -> list[int]:
        return [token_id for item in self.items if isinstance(item, TokenOutput) for token_id in item.token_ids]


class Gateway:
    """A session, what it sends, and a scheduler's packets for it."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.answers: list[Answer] = []
        self.session = GatewaySession(
            self.packets.append, self.answers.append, gateway_id="g", first_link=10, lost_timeout=5.0, now=0.0
        )
        self.stream = Stream()
        self._number = 0

    def hear(
        self, item: object, *, link: int = 10, number: int | None = None, origin: int = 0, now: float = 0.0
    ) -> None:
        self.session.take(Packet(link, self._number if number is None else number, item, origin), now)
        self._number += number is None

    def sent(self) -> list[Packet]:
        taken, self.packets[:] = list(self.packets), []
        return taken

    def ready(self) -> None:
        self.session.beat(0.0)
        self.hear(READY)
        self.sent()

    def submit(self, *requests: AddRequest) -> None:
        self.session.submit(requests, self.stream, 0.0)


def test_given_no_answer_when_beats_are_due_then_hello_is_said_again_with_number_0() -> None:
    gateway = Gateway()
    gateway.session.beat(0.0)
    gateway.session.beat(0.25)
    assert gateway.sent() == [Packet(10, 0, Hello("g"))] * 2


def test_given_an_open_link_when_a_beat_is_due_then_it_says_how_much_was_taken() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.hear(STATS)
    gateway.session.beat(0.25)
    assert gateway.sent() == [Packet(10, 1, Heartbeat(2))]


def test_given_a_long_burst_when_it_is_taken_then_word_of_it_goes_out_before_the_next_beat() -> None:
    gateway = Gateway()
    gateway.ready()
    for _ in range(512):
        gateway.hear(STATS)
    assert gateway.sent() == [Packet(10, 1, Heartbeat(512))]


def test_given_a_gap_when_a_packet_shows_it_then_the_next_link_opens_and_the_journal_is_sent_again() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.hear(batch(0, 4))
    gateway.sent()
    gateway.hear(batch(2, 6), number=5)
    assert gateway.sent() == [Packet(11, 0, Hello("g"))]
    gateway.hear(READY, link=11, number=0)
    ((link, number, sent),) = [(p.link, p.number, p.message) for p in gateway.sent()]
    assert (link, number) == (11, 1)
    assert isinstance(sent, AddRequest)
    assert sent.emitted == [[4]]
    gateway.hear(batch(0, 4, 5, end=FINISH_LENGTH), link=11, number=1)
    assert gateway.stream.tokens() == [4, 5]
    assert gateway.stream.ends == [None]


def test_given_a_scheduler_that_does_not_know_us_when_it_says_so_then_the_next_link_opens_once() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.hear(Unlinked(2), number=0)
    gateway.hear(Unlinked(2), number=0)
    assert gateway.sent() == [Packet(11, 0, Hello("g"))]
    assert gateway.session.num_links == 2


def test_given_a_hello_that_two_schedulers_got_when_the_second_answers_then_the_next_link_opens() -> None:
    """The first one died after its answer: its packets and its successor's have the same link and the same numbers."""
    gateway = Gateway()
    gateway.session.beat(0.0)
    gateway.session.beat(0.25)
    gateway.hear(EngineInfo(epoch=2, ready=False), number=0, origin=2)
    gateway.sent()
    gateway.hear(EngineInfo(epoch=3, ready=True, vocab_size=9), number=0, origin=3)
    assert gateway.sent() == [Packet(11, 0, Hello("g"))]
    gateway.hear(STATS, number=1, origin=2)
    gateway.hear(EngineInfo(epoch=3, ready=True, vocab_size=9), link=11, number=0, origin=3)
    assert gateway.session.is_ready(0.0)
    gateway.hear(EngineInfo(epoch=2, ready=False), link=11, number=1, origin=2)  # late, from the dead one
    assert gateway.session.is_ready(0.0)
    assert gateway.sent() == []


def test_given_packets_of_an_older_link_when_they_come_late_then_they_only_show_that_somebody_lives() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.hear(Unlinked(2), number=0)
    gateway.sent()
    gateway.hear(batch(0, 4), link=10, number=1, now=3.0)
    assert gateway.stream.items == []
    assert gateway.sent() == []
    assert gateway.session.heard_at == 3.0


def test_given_a_finished_choice_when_the_request_is_sent_again_then_that_choice_is_cancelled_after_it() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message(n=2))
    gateway.session.cancel("r", 1)
    gateway.hear(Unlinked(2), number=0)
    gateway.sent()
    gateway.hear(READY, link=11, number=0)
    first, second = (packet.message for packet in gateway.sent())
    assert isinstance(first, AddRequest)
    assert second == CancelRequest("r", 1)


def test_given_an_engine_that_is_not_ready_when_requests_come_then_they_wait_for_the_journal_to_be_sent() -> None:
    gateway = Gateway()
    with pytest.raises(OverloadedError):
        gateway.submit(message())
    gateway.ready()
    gateway.hear(Unlinked(2), number=0)
    gateway.sent()
    gateway.submit(message())
    gateway.hear(EngineInfo(epoch=2, ready=False), link=11, number=0)
    assert gateway.sent() == []
    gateway.hear(EngineInfo(epoch=2, ready=True), link=11, number=1)
    assert [type(packet.message) for packet in gateway.sent()] == [AddRequest]


def test_given_tokens_of_an_epoch_that_was_replaced_when_they_come_then_they_are_dropped() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.hear(EngineInfo(epoch=2, ready=False))
    gateway.hear(batch(0, 4, epoch=1))
    assert gateway.stream.items == []
    assert gateway.session.num_protocol_errors == 0


def test_given_a_stream_with_a_hole_when_it_comes_then_that_request_ends_and_no_other() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message(), message("s"))
    gateway.sent()
    gateway.hear(batch(3, 4))
    assert [type(error) for error in gateway.stream.ends] == [EngineError]
    assert [packet.message for packet in gateway.sent()] == [CancelRequest("r")]
    assert gateway.session.num_live == 1


def test_given_tokens_of_many_steps_that_were_held_when_they_come_then_each_choice_gets_its_own_at_once() -> None:
    sent, gateway = Sent(window=1), Gateway()
    gateway.ready()
    gateway.submit(message(n=2))
    (first,) = (packet.message.ref for packet in gateway.sent())  # type: ignore[attr-defined]
    sent.link.say(READY)
    for index in range(3):
        sent.link.say(
            OutputBatch(
                1, index, [], [], column([first, first + 1]), column([0, 0]), column([index, 10 + index]), base=index
            )
        )
    sent.link.say(batch(3, 8, end=FINISH_LENGTH))
    sent.messages()
    sent.link.acknowledge(1)
    (joined,) = sent.messages()
    gateway.hear(joined)
    assert [(item.choice, item.index, item.token_ids) for item in gateway.stream.items] == [  # type: ignore[union-attr]
        (0, 0, [0, 1, 2]),
        (1, 0, [10, 11, 12]),
        (0, 3, [8]),
    ]


def test_given_columns_of_different_lengths_when_they_come_then_it_is_a_protocol_error() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    with pytest.raises(ProtocolError):
        gateway.hear(OutputBatch(1, 0, [], [], column([0, 1]), column([0]), column([4])))
    assert gateway.stream.items == []


def test_given_silence_when_it_lasts_too_long_then_live_requests_end_with_an_error() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.session.beat(5.0)
    assert gateway.stream.ends == []
    gateway.session.beat(5.1)
    assert [str(error) for error in gateway.stream.ends] == ["The engine cannot be reached."]
    assert not gateway.session.accepts(5.1)


@pytest.mark.parametrize(("status", "error"), [(400, InvalidRequestError), (503, OverloadedError), (500, EngineError)])
def test_given_a_refusal_when_it_comes_then_the_stream_ends_with_what_its_status_means(
    status: int, error: type[Exception]
) -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.hear(RequestRejected("r", status, "no"))
    assert [type(end) for end in gateway.stream.ends] == [error]


def test_given_a_cancel_when_tokens_still_come_then_only_the_end_is_heard() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message())
    gateway.session.cancel("r")
    gateway.hear(batch(0, 4))
    assert [item.finish_reason for item in gateway.stream.items if isinstance(item, TokenOutput)] == [FINISH_CANCELLED]
    assert gateway.stream.ends == [None]


@pytest.mark.parametrize(("answer", "words"), [("a stream", [Told("r")]), ("", [])])
def test_given_a_request_that_has_ended_when_its_reader_has_all_then_the_engine_is_told_once_of_a_stream(
    answer: str, words: list[object]
) -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message(answer=answer))
    gateway.session.told("r")
    gateway.hear(batch(0, 4, end=FINISH_LENGTH))
    gateway.sent()
    gateway.session.told("r")
    gateway.session.told("r")
    assert gateway.sent() == []  # not worth a message of its own
    gateway.submit(message("next"))
    _, *others = [packet.message for packet in gateway.sent()]
    assert others == words
    gateway.session.tell_told()
    assert gateway.sent() == []


def test_given_a_stream_that_was_read_when_a_beat_is_due_then_the_engine_is_told() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.submit(message(answer="a stream"))
    gateway.hear(batch(0, 4, end=FINISH_LENGTH))
    gateway.sent()
    gateway.session.told("r")
    gateway.session.beat(0.0)
    assert Told("r") in [packet.message for packet in gateway.sent()]


def test_given_a_question_without_an_answer_when_the_next_link_opens_then_it_is_asked_again_until_given_up() -> None:
    gateway = Gateway()
    gateway.ready()
    for query in (4, 5, 6):
        gateway.session.ask(ClaimRequest(query, "t", "a"))
    gateway.hear(Claimed(4, [], False))
    gateway.session.give_up(5)
    gateway.hear(Unlinked(2), number=0)
    gateway.sent()
    gateway.hear(READY, link=11, number=0)
    assert [packet.message for packet in gateway.sent()] == [ClaimRequest(6, "t", "a")]


def test_given_a_question_when_the_answer_comes_then_it_is_handed_on() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.session.ask(ClaimRequest(4, "t", "a"))
    assert gateway.sent() == [Packet(10, 1, ClaimRequest(4, "t", "a"))]
    gateway.hear(Claimed(4, [message()], False))
    assert gateway.answers == [Claimed(4, [message()], False)]


def test_given_a_claim_that_is_not_wanted_when_given_back_then_each_request_of_it_is() -> None:
    gateway = Gateway()
    gateway.ready()
    gateway.session.release([message(), message("s")])
    assert [packet.message for packet in gateway.sent()] == [ReleaseClaim("r"), ReleaseClaim("s")]


def test_given_what_no_scheduler_sends_when_it_comes_then_it_is_a_protocol_error() -> None:
    gateway = Gateway()
    gateway.ready()
    with pytest.raises(ProtocolError, match="does not send Hello"):
        gateway.hear(Hello("g"))


# -- ranks ----------------------------------------------------------------------------------------------------------

INFO = ExecutorInfo(
    epoch=1, num_blocks=4, block_size=4, vocab_size=9, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8
)


def step_plan(step: int, *, is_first: bool = False) -> StepPlan:
    return StepPlan(1, step, column([0]), column([1]), is_first=is_first)


class Group:
    """Two ranks that are ready, and the plans that were sent to them."""

    def __init__(self) -> None:
        self.plans: list[object] = []
        self.ranks = RankGroup(self._send, world_size=2, epoch=1)
        self.hello(0)
        self.hello(1)

    def _send(self, identities: object, sent: object) -> list[bytes]:
        self.plans.append(sent)
        return []

    def hello(self, rank: int, times: int = 1) -> None:
        for _ in range(times):
            self.ranks.handle(b"%d" % rank, WorkerHello(1, 1, rank, 2, 4, 4, 9, 16, 2, 8))


def test_given_a_plan_without_answer_when_all_ranks_stay_idle_then_the_group_has_failed() -> None:
    group = Group()
    group.ranks.submit(step_plan(1))
    group.hello(0, 30)
    group.hello(1, 9)
    group.ranks.check()
    group.hello(1)
    with pytest.raises(EngineError, match="step 1 has no answer"):
        group.ranks.check()


def test_given_idle_ranks_when_nothing_is_asked_or_answers_come_then_that_is_no_failure() -> None:
    group = Group()
    for rank in (0, 1):
        group.hello(rank, 30)
    for step in (1, 2, 3):
        group.ranks.submit(step_plan(step))
        for rank in (0, 1):
            group.hello(rank, 9)
    for rank in (0, 1):
        group.ranks.handle(b"0", StepResult(1, rank + 1, column(), column()))
        group.hello(rank, 9)
    group.ranks.check()


def test_given_ranks_that_said_hello_when_plans_are_sent_then_the_first_of_them_says_so() -> None:
    group = Group()
    for step in (7, 8):
        group.ranks.submit(step_plan(step))
    assert group.plans == [step_plan(7, is_first=True), step_plan(8)]
    group.ranks.expect(1, group=1)
    for rank in (0, 1):
        group.hello(rank)
    group.ranks.submit(step_plan(9))
    assert group.plans[-1] == step_plan(9, is_first=True)


class Steps:
    """Runs nothing."""

    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        self.launched.append(plan.step)

    def drop_rows(self) -> None:
        self.launched.clear()


def test_given_a_first_plan_that_was_lost_when_the_second_comes_then_the_rank_does_not_begin_with_it() -> None:
    """Otherwise it would add up with ranks that run the first one."""
    steps = Steps()
    session = RankSession(steps, lambda sent: None, rank=1, world_size=2, info=INFO)
    with pytest.raises(EngineError, match="step 2 is not the first one"):
        session.handle(step_plan(2))
    assert steps.launched == []


def test_given_plans_in_order_when_they_come_then_they_run_and_a_second_first_one_is_refused() -> None:
    steps = Steps()
    session = RankSession(steps, lambda sent: None, rank=1, world_size=2, info=INFO)
    session.handle(step_plan(4, is_first=True))
    session.handle(step_plan(5))
    with pytest.raises(EngineError, match="step 6 is the first one"):
        session.handle(step_plan(6, is_first=True))
    assert steps.launched == [4, 5]


def test_given_a_scheduler_that_answers_many_old_hellos_when_adopted_then_it_is_told_once_until_it_is_asked_again() -> (
    None
):
    """Hellos pile up while no scheduler is there; each answer would carry the whole account of held blocks."""
    said: list[object] = []
    session = RankSession(Steps(), said.append, rank=0, world_size=2, info=INFO)
    for _ in range(3):
        session.say_hello()
    said.clear()
    for _ in range(3):
        session.handle(Adopt(2))
    assert [hello.epoch for hello in said if isinstance(hello, WorkerHello)] == [2]
    session.say_hello()  # the answer was lost
    session.handle(Adopt(2))
    assert [hello.epoch for hello in said if isinstance(hello, WorkerHello)] == [2, 1, 2]
    session.handle(Adopt(3))
    assert [hello.epoch for hello in said if isinstance(hello, WorkerHello)] == [2, 1, 2, 3]


@pytest.mark.parametrize("most", [3, 10**6])
def test_given_held_steps_with_bases_of_their_own_when_told_then_each_token_has_its_index_and_no_column_was_written(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "_MOST_TOKENS", most)
    sent, draw = Sent(window=1), random.Random(7)
    sent.link.say(READY)
    sent.messages()
    said, before = [], []
    for step in range(20):
        count = draw.randrange(4)
        columns = [column(draw.randrange(-99, 99) for _ in range(count)) for _ in range(3)]
        base = draw.randrange(-50, 50)
        begun = [step] * draw.randrange(2)
        sent.link.say(
            OutputBatch(1, step, batch(0, step).outputs, [], columns[0], columns[1], columns[2], begun, begun, base)
        )
        said.append((columns, base, begun))
        before.append([values.tolist() for values in columns])
    sent.link.acknowledge(1)
    told = [message for message in sent.messages() if isinstance(message, OutputBatch)]
    assert [[values.tolist() for values in columns] for columns, *_ in said] == before
    expected = [
        (ref, base + offset, token_id)
        for (refs, offsets, token_ids), base, _ in said
        for ref, offset, token_id in zip(refs, offsets, token_ids, strict=True)
    ]
    assert expected == [
        (ref, message.base + offset, token_id)
        for message in told
        for ref, offset, token_id in zip(message.refs, message.offsets, message.token_ids, strict=True)
    ]
    assert [ref for message in told for ref in message.begun_refs] == [ref for *_, begun in said for ref in begun]
    assert all(len(message.refs) <= max(most, 3) for message in told)
    assert [len(message.outputs) for message in told] == [0] * (len(told) - 1) + [1]
    assert (len(told) == 1) == (most > 3)
