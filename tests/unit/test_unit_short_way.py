"""The short way of a choice's plain tokens: what it takes goes nowhere else, and what it does not goes on as before."""

from __future__ import annotations

import pytest

from novainfer.client.session import GatewaySession
from novainfer.client.stream import Backlog, ShortWay
from novainfer.protocol.columns import column
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import FINISH_LENGTH, AddRequest, EngineInfo, OutputBatch, RequestRejected, TokenOutput
from novainfer.sampling.params import SamplingParams
from tests.unit.test_unit_link import Stream

pytestmark = pytest.mark.unit


class Way(ShortWay):
    """Notes what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[list[int]] = []

    @classmethod
    def pour(cls, taken: list[tuple[Way, int]]) -> None:
        for way, token_id in taken:
            assert way.emitted[-1] == token_id
            way.taken.append([token_id])

    def pour_run(self, token_ids: list[int]) -> None:
        assert self.emitted[-len(token_ids) :] == token_ids
        self.taken.append(token_ids)


class Talk:
    """A request of two choices whose first tokens have come, and a short way for the first choice."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.backlog = Backlog()
        self.session = self.new_session()
        self.stream = Stream()
        self.way = Way()
        self._number = 0
        self.hear(EngineInfo(epoch=1, ready=True, vocab_size=9))
        self.session.submit([AddRequest("r", [1], SamplingParams(n=2, seed=1))], self.stream, 0.0)
        self.hear(OutputBatch(1, 0, [TokenOutput("r", choice, 0, [3]) for choice in (0, 1)]))
        self.session.shorten("r", 0, self.way)
        self.way.is_open = True

    def new_session(self) -> GatewaySession:
        """Of another engine."""
        self._number = 0
        return GatewaySession(
            self.packets.append,
            lambda answer: None,
            gateway_id="g",
            first_link=10,
            lost_timeout=5.0,
            now=0.0,
            backlog=self.backlog,
        )

    def hear(self, item: object) -> None:
        self.session.take(Packet(10, self._number, item, 0), 0.0)
        self._number += 1

    def hear_tokens(self, index: int, *tokens: int, epoch: int = 1) -> None:
        refs = column(range(len(tokens)))
        zeros = column([0] * len(refs))
        self.hear(OutputBatch(epoch, 1, [], refs=refs, offsets=zeros, token_ids=column(tokens), base=index))

    def journal(self) -> list[list[int]]:
        """What another engine would be told."""
        entry = self.session._journal.get("r")
        assert entry is not None
        return entry.resume_request().emitted


def test_given_a_short_way_when_it_takes_tokens_then_they_are_in_the_journal_and_nowhere_else() -> None:
    talk = Talk()
    talk.hear_tokens(1, 4, 5)
    talk.way.is_open = False
    talk.hear_tokens(2, 6, 7)
    talk.way.is_open = True
    talk.hear_tokens(3, 8, 1)
    assert talk.way.taken == [[4], [8]]
    assert talk.stream.tokens() == [3, 3, 5, 6, 7, 1]
    assert talk.journal() == [[3, 4, 6, 8], [3, 5, 7, 1]]


def test_given_tokens_that_come_again_or_too_late_when_heard_then_the_short_way_does_not_see_them() -> None:
    talk = Talk()
    talk.hear_tokens(1, 4, 5)
    talk.hear_tokens(1, 4, 5)
    talk.hear(EngineInfo(epoch=2, ready=True, vocab_size=9))
    talk.hear_tokens(2, 6, 7, epoch=1)
    talk.session.cancel("r", 0)
    talk.hear_tokens(2, 6, 7, epoch=2)
    assert talk.way.taken == [[4]]
    assert talk.journal() == [[3, 4], [3, 5, 7]]


def test_given_a_batch_of_a_newer_engine_when_one_of_the_older_comes_behind_it_then_it_is_dropped() -> None:
    talk = Talk()
    talk.hear_tokens(1, 4, 5, epoch=2)
    talk.hear_tokens(2, 6, 7, epoch=1)
    assert talk.way.taken == [[4]]
    assert talk.journal() == [[3, 4], [3, 5]]


def test_given_a_request_that_has_ended_when_a_short_way_is_offered_then_nothing_is_kept_of_it() -> None:
    talk = Talk()
    ends = [TokenOutput("r", choice, 1, [4], FINISH_LENGTH) for choice in (0, 1)]
    talk.hear(OutputBatch(1, 1, ends))
    talk.session.shorten("r", 0, talk.way)
    assert talk.session._journal.choices == {}
    assert talk.session._journal.ways == {}
    assert talk.way.taken == []


def test_given_one_choice_that_has_ended_when_a_short_way_is_offered_then_the_other_keeps_its_own() -> None:
    talk = Talk()
    other = Way()
    talk.session.shorten("r", 1, other)
    other.is_open = True
    talk.hear(OutputBatch(1, 1, [TokenOutput("r", 0, 1, [4], FINISH_LENGTH)]))
    talk.session.shorten("r", 0, talk.way)
    talk.hear(OutputBatch(1, 2, [], refs=column([0, 1]), offsets=column([2, 1]), token_ids=column([7, 8])))
    assert talk.way.taken == []
    assert other.taken == [[8]]
    assert talk.journal() == [[3, 4], [3, 8]]


def test_given_a_backlog_when_tokens_come_then_they_are_in_the_journal_at_once_and_told_together() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4, 5)
    talk.hear_tokens(2, 6, 7)
    assert talk.way.taken == []
    assert talk.journal() == [[3, 4, 6], [3, 5, 7]]
    talk.session.flush()
    assert talk.way.taken == [[4, 6]]
    talk.session.flush()
    assert talk.way.taken == [[4, 6]]


def test_given_tokens_that_are_held_back_when_their_way_is_closed_then_they_go_to_the_stream() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4)
    talk.way.is_open = False
    talk.hear_tokens(2, 6)  # overtakes none
    talk.session.flush()
    assert talk.way.taken == []
    assert talk.stream.tokens() == [3, 3, 4, 6]


def test_given_tokens_that_are_held_back_when_the_choice_ends_then_they_are_told_before_that() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4)
    talk.hear(OutputBatch(1, 2, [TokenOutput("r", 0, 2, [6], FINISH_LENGTH)]))
    assert talk.way.taken == [[4]]
    assert talk.stream.tokens() == [3, 3, 6]
    assert talk.journal() == [[3, 4, 6], [3]]


def test_given_a_backlog_when_a_choice_without_a_short_way_goes_on_then_its_reader_gets_one_output_of_it() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    for index in range(1, 5):
        talk.hear_tokens(index, index, index + 1)
    assert talk.journal() == [[3, 1, 2, 3, 4], [3, 2, 3, 4, 5]]
    assert talk.stream.tokens() == [3, 3]
    talk.session.flush()
    assert talk.way.taken == [[1, 2, 3, 4]]
    assert talk.stream.items[2:] == [TokenOutput("r", 1, 1, [2, 3, 4, 5])]


def test_given_a_backlog_when_tokens_are_not_just_the_next_ones_then_none_is_told_twice_or_lost() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4, 5)
    talk.hear_tokens(1, 4, 5)
    talk.hear(EngineInfo(epoch=2, ready=True, vocab_size=9))
    talk.hear_tokens(2, 8, 8, epoch=1)
    talk.hear_tokens(2, 6, 7, epoch=2)
    talk.hear_tokens(3, 1, 2, epoch=2)
    talk.session.flush()
    assert talk.journal() == [[3, 4, 6, 1], [3, 5, 7, 2]]
    assert [token for run in talk.way.taken for token in run] == [4, 6, 1]
    assert talk.stream.tokens() == [3, 3, 5, 7, 2]


@pytest.mark.parametrize("what", ["cancel", "fail", "leave"])
def test_given_tokens_that_are_held_back_when_their_request_goes_then_they_are_told_before(what: str) -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4)
    if what == "cancel":
        talk.session.cancel("r")
    elif what == "fail":
        talk.session.fail_all(RuntimeError("gone"))
    else:
        talk.session.leave()
    talk.session.flush()
    assert talk.way.taken == [[4]]


def test_given_a_message_of_several_steps_when_heard_then_each_choice_gets_its_tokens_together() -> None:
    talk = Talk()
    refs, offsets = column([0, 1, 0, 1]), column([0, 0, 1, 1])
    talk.hear(OutputBatch(1, 1, [], refs=refs, offsets=offsets, token_ids=column([4, 5, 6, 7]), base=1))
    assert talk.way.taken == [[4, 6]]
    assert talk.stream.tokens() == [3, 3, 5, 7]
    assert talk.journal() == [[3, 4, 6], [3, 5, 7]]


def test_given_a_request_that_moves_to_another_engine_when_its_tokens_come_from_there_then_they_go_the_same_way() -> (
    None
):
    talk = Talk()
    talk.hear_tokens(1, 4, 5)
    (moved,) = talk.session.leave()
    assert talk.session._journal.ways == {}
    talk.session = talk.new_session()
    talk.hear(EngineInfo(epoch=1, ready=True, vocab_size=9))
    talk.session.adopt(moved, 0.0)
    talk.hear_tokens(2, 6, 7)
    assert talk.way.taken == [[4], [6]]
    assert talk.journal() == [[3, 4, 6], [3, 5, 7]]


def test_given_tokens_that_are_held_back_when_their_request_is_refused_then_they_are_told_before() -> None:
    talk = Talk()
    talk.backlog.is_behind = True
    talk.hear_tokens(1, 4)
    talk.hear(RequestRejected("r", 503, "no more"))
    assert talk.way.taken == [[4]]
