"""The short way of a choice's plain tokens: what it takes goes nowhere else, and what it does not goes on as before."""

from __future__ import annotations

import pytest

from novainfer.client.session import GatewaySession
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import FINISH_LENGTH, AddRequest, EngineInfo, OutputBatch, TokenOutput
from novainfer.sampling.params import SamplingParams
from tests.unit.test_unit_link import Stream

pytestmark = pytest.mark.unit


class Talk:
    """A request of two choices whose first tokens have come, and a short way for the first choice."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.session = GatewaySession(
            self.packets.append, lambda answer: None, gateway_id="g", first_link=10, lost_timeout=5.0, now=0.0
        )
        self.stream = Stream()
        self.taken: list[int] = []
        self.is_open = True
        self._number = 0
        self.hear(EngineInfo(epoch=1, ready=True, vocab_size=9))
        self.session.submit([AddRequest("r", [1], SamplingParams(n=2, seed=1))], self.stream, 0.0)
        self.hear(OutputBatch(1, 0, [TokenOutput("r", choice, 0, [3]) for choice in (0, 1)]))
        self.session.shorten("r", 0, self.short)

    def short(self, token_id: int) -> bool:
        if self.is_open:
            self.taken.append(token_id)
        return self.is_open

    def hear(self, item: object) -> None:
        self.session.take(Packet(10, self._number, item, 0), 0.0)
        self._number += 1

    def hear_tokens(self, index: int, *tokens: int, epoch: int = 1) -> None:
        refs = list(range(len(tokens)))
        self.hear(OutputBatch(epoch, 1, [], refs=refs, indexes=[index] * len(refs), token_ids=list(tokens)))

    def journal(self) -> list[list[int]]:
        """What another engine would be told."""
        entry = self.session._journal.get("r")
        assert entry is not None
        return entry.resume_request().emitted


def test_given_a_short_way_when_it_takes_tokens_then_they_are_in_the_journal_and_nowhere_else() -> None:
    talk = Talk()
    talk.hear_tokens(1, 4, 5)
    talk.is_open = False
    talk.hear_tokens(2, 6, 7)
    talk.is_open = True
    talk.hear_tokens(3, 8, 1)
    assert talk.taken == [4, 8]
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
    assert talk.taken == [4]
    assert talk.journal() == [[3, 4], [3, 5, 7]]


def test_given_a_request_that_has_ended_when_a_short_way_is_offered_then_nothing_is_kept_of_it() -> None:
    talk = Talk()
    ends = [TokenOutput("r", choice, 1, [4], FINISH_LENGTH) for choice in (0, 1)]
    talk.hear(OutputBatch(1, 1, ends))
    talk.session.shorten("r", 0, talk.short)
    assert talk.session._journal.choices == {}
    assert talk.taken == []
