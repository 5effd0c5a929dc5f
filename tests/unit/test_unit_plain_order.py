"""Plain tokens from the journal into the connection in one call: none overtakes one that is held back before it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.schemas import CompletionRequest
from novainfer.client.session import GatewaySession
from novainfer.protocol.columns import column
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import FINISH_LENGTH, AddRequest, EngineInfo, OutputBatch, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.text.tokenizer import Tokenizer
from tests.unit.test_unit_poured_tokens import PLAIN, PROMPT, REQUEST, Server, settle, text

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

FIRST_TOKEN = 40  # from here on each is another letter
MOVES = ("token", "token", "behind", "caught up", "pause", "resume", "settle")


class Talk:
    """A stream whose tokens come from a session with a scheduler, as they do in a gateway."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest) -> None:
        self.server = Server(tokenizer, request)
        self.session = GatewaySession(
            lambda packet: None,
            lambda answer: None,
            gateway_id="g",
            first_link=10,
            lost_timeout=5.0,
            now=0.0,
            backlog=self.server.backlog,
        )
        self.server.stream._shorten = self.session.shorten
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._number = 0
        self.hear(EngineInfo(epoch=1, ready=True, vocab_size=400))
        self.session.submit([AddRequest("r", PROMPT, SamplingParams(max_tokens=100))], self.server.stream, 0.0)
        self.task = self.server.start()

    def hear(self, item: object) -> None:
        self.session.take(Packet(10, self._number, item, 0), 0.0)
        self._number += 1

    def whole(self) -> str:
        """The text of all tokens so far."""
        return self._tokenizer.decode([*PROMPT, *self.tokens])[len(self._tokenizer.decode(PROMPT)) :]

    async def do(self, move: str) -> None:
        server, place = self.server, len(self.tokens)
        if move == "token":
            self.tokens.append(FIRST_TOKEN + place % 40)
            self.hear(
                OutputBatch(1, 1, [], refs=column([0]), offsets=column([place]), token_ids=column(self.tokens[-1:]))
            )
        elif move in ("behind", "caught up"):
            server.backlog.is_behind = move == "behind"
            self.session.flush()
        elif move == "pause":
            server.cycle.flow.pause_writing()
        elif move == "resume":
            server.cycle.flow.resume_writing()
        else:
            await settle()

    async def begin(self) -> None:
        """Two tokens, so that the rest may go the short way."""
        for move in ("token", "settle") * 2:
            await self.do(move)

    async def end(self) -> None:
        self.session.flush()
        self.hear(OutputBatch(1, 1, [TokenOutput("r", 0, len(self.tokens), [], FINISH_LENGTH)]))
        self.server.cycle.flow.resume_writing()
        await asyncio.wait_for(self.task, 20)
        self.server.generation.close()


@settings(max_examples=100, deadline=None)
@given(moves=st.lists(st.sampled_from(MOVES), max_size=30), request=st.sampled_from([PLAIN, REQUEST]))
@example(moves=["behind", "token", "token", "caught up", "token"], request=PLAIN)
@example(moves=["pause", "token", "token", "resume", "token"], request=PLAIN)
@example(moves=["pause", "token", "settle", "resume", "token"], request=PLAIN)
def test_given_tokens_that_are_held_back_when_others_come_then_these_are_told_after_them(
    tokenizer: Tokenizer, moves: list[str], request: CompletionRequest
) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, request)
        await talk.begin()
        has_short_way = 0 in talk.session._journal.ways
        assert has_short_way == (request is PLAIN)
        for move in moves:
            await talk.do(move)
            assert talk.whole().startswith(text(talk.server.events()))
        await talk.end()
        assert text(talk.server.events()) == talk.whole()

    asyncio.run(main())


def test_given_a_backlog_when_plain_tokens_come_then_they_are_told_together_when_it_is_over(
    tokenizer: Tokenizer,
) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, PLAIN)
        await talk.begin()
        before, data = len(talk.server.events()), talk.server.pipe.data
        for move in ("behind", "token", "token", "token"):
            await talk.do(move)
        assert talk.server.pipe.data == data
        await talk.do("caught up")
        assert text(talk.server.events()) == talk.whole(), "at once"
        assert len(talk.server.events()) == before + 1
        await talk.do("token")
        assert len(talk.server.events()) == before + 2
        await talk.end()

    asyncio.run(main())


def test_given_nothing_that_is_held_back_when_a_token_comes_then_it_is_told_at_once(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, PLAIN)
        await talk.begin()
        for moves in (("token",), ("pause", "token", "resume", "settle", "token")):
            for move in moves:
                await talk.do(move)
            assert text(talk.server.events()) == talk.whole()
        await talk.end()

    asyncio.run(main())


def test_given_part_of_a_character_that_came_another_way_when_known_tokens_follow_then_it_stands_before_them(
    tokenizer: Tokenizer,
) -> None:
    lead = next(i for i in range(3, 300) if tokenizer.token_bytes(i) == b"\xc3")

    async def main() -> None:
        talk = Talk(tokenizer, PLAIN)
        await talk.begin()

        def come(token_id: int) -> None:
            talk.tokens.append(token_id)
            talk.hear(
                OutputBatch(
                    1,
                    1,
                    [],
                    refs=column([0]),
                    offsets=column([0]),
                    token_ids=column([token_id]),
                    base=len(talk.tokens) - 1,
                )
            )

        for token_id in (44, 45, 44, 45):
            come(token_id)
        talk.server.cycle.flow.pause_writing()
        come(lead)
        talk.server.cycle.flow.resume_writing()
        await settle()
        for token_id in (44, 45):
            come(token_id)
        assert text(talk.server.events()) == talk.whole()
        await talk.end()

    asyncio.run(main())
