"""Requests whose gateway is gone: who gets them, for how long, and with what; the scheduler process on the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from novainfer.engine.orphans import Orphans, as_message
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import (
    AddRequest,
    CancelRequest,
    Claimed,
    ClaimRequest,
    Hello,
    OutputBatch,
    ReleaseClaim,
    RequestRejected,
    Told,
)
from novainfer.sampling.params import SamplingParams
from novainfer.scheduler.request import Request, make_request
from tests.oracle import oracle_stream
from tests.replica import OracleGroup, make_replica

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

GRACE = 10.0
LENGTH = 4
PROMPT = list(range(9))


def message(request_id: str = "r", **fields: object) -> AddRequest:
    params = SamplingParams(seed=1, max_tokens=LENGTH, ignore_eos=True)
    sent = AddRequest(request_id, PROMPT, params, tenant="ada", aliases=["x"], answer="a stream")
    return replace(sent, **fields)  # type: ignore[arg-type]


def running(sent: AddRequest, *tokens: int) -> Request:
    """The scheduler's view of it, with these tokens of choice 0."""
    request = make_request(sent, 0, 0.0)
    request.sequences[0].token_ids.extend(tokens)
    return request


def orphans(*requests: Request) -> Orphans:
    kept = Orphans(GRACE)
    for request in requests:
        kept.add(request, 100.0)
    return kept


@pytest.mark.parametrize(("tenant", "alias"), [("bob", "x"), ("", "x"), ("ada", "r"), ("ada", "")])
def test_given_an_orphan_when_somebody_else_asks_then_there_is_none(tenant: str, alias: str) -> None:
    kept = orphans(running(message()))
    assert kept.claim(tenant, alias, b"g1", 101.0) == []
    assert len(kept.claim("ada", "x", b"g1", 101.0)) == 1


def test_given_an_orphan_when_nobody_claims_it_in_time_then_it_is_over() -> None:
    kept = orphans(running(message()))
    assert kept.expired(109.9) == []
    assert kept.expired(110.0) == ["r"]
    assert len(kept) == 0


def test_given_an_orphan_that_is_lent_when_its_time_is_over_then_it_has_the_time_to_be_sent() -> None:
    kept = orphans(running(message()))
    kept.claim("ada", "x", b"g1", 109.0)
    assert kept.expired(118.9) == []
    assert kept.expired(119.0) == ["r"]


@pytest.mark.parametrize("request_id", ["r", None])
def test_given_an_orphan_when_claimed_and_given_back_again_and_again_then_its_time_does_not_begin_anew(
    request_id: str | None,
) -> None:
    kept = orphans(running(message()))
    for now in (102.0, 108.0):
        assert len(kept.claim("ada", "x", b"g1", now)) == 1
        kept.release(b"g1", request_id)
    assert kept.expired(110.0) == ["r"]


def test_given_log_probabilities_when_claimed_then_the_tokens_are_computed_again_with_them() -> None:
    params = SamplingParams(seed=1, logprobs=0, prompt_logprobs=0)
    assert as_message(running(message(params=params), 7), 101.0).emitted == [[]]


@pytest.mark.parametrize(("now", "left"), [(3.0, 1.0), (9.0, 1e-3)])
def test_given_a_deadline_when_claimed_then_what_is_left_of_it_goes_along(now: float, left: float) -> None:
    assert as_message(running(message(deadline=4.0)), now).deadline == left


class Scheduler:
    """A scheduler process, gateways that say things to it, and what it has said to each since it was last asked."""

    def __init__(self) -> None:
        self.group = OracleGroup()
        self.now = 0.0
        self._numbers: dict[bytes, int] = {}
        self._gone: set[bytes] = set()
        self._said: dict[bytes, list[object]] = {}
        self._replica = make_replica(self.group, self._take, GRACE, self.now)
        self._replica.turn(self.now)
        for name in (b"g1", b"g2", b"g3"):
            self.say(name, Hello(name.decode()))

    def say(self, gateway: bytes, *messages: object) -> None:
        for item in messages:
            number = self._numbers.get(gateway, 0)
            self._numbers[gateway] = number + 1
            self._replica.handle(gateway, Packet(1, number, item), self.now)

    def heard(self, gateway: bytes, kind: type) -> list[object]:
        """What of this kind was said to it; all else is forgotten."""
        return [item for item in self._said.pop(gateway, []) if isinstance(item, kind)]

    def run(self) -> None:
        """Until nothing moves."""
        while self._replica.turn(self.now):
            pass

    def lose(self, gateway: bytes) -> None:
        """Its process dies, and the next word to it shows that."""
        self._gone.add(gateway)
        self.now += 1.0
        self.run()
        self.run()

    def claim(self, gateway: bytes, tenant: str = "ada") -> Claimed:
        self.say(gateway, ClaimRequest(1, tenant, "x"))
        (answer,) = self.heard(gateway, Claimed)
        assert isinstance(answer, Claimed)
        return answer

    def _take(self, gateway: bytes, packet: Packet) -> bool:
        self._said.setdefault(gateway, []).append(packet.message)
        return gateway not in self._gone


def tokens(sent: AddRequest) -> list[int]:
    return oracle_stream(PROMPT, sent.params, 0, (), 50)


def test_given_a_stream_that_has_ended_when_it_is_being_read_then_it_is_owned_until_its_gateway_is_gone() -> None:
    scheduler = Scheduler()
    scheduler.say(b"g1", message())
    scheduler.run()
    assert scheduler.claim(b"g2") == Claimed(1, [], is_owned=True)
    assert scheduler.claim(b"g2", "bob") == Claimed(1, [], is_owned=False)
    scheduler.lose(b"g1")
    claimed = scheduler.claim(b"g2")
    # The last token ended it: sampled again, it comes with its end.
    assert [request.emitted for request in claimed.requests] == [[tokens(message())[:-1]]]
    assert claimed.num_tokens == [[LENGTH]]


# A cancel of all of it may cross the end: its gateway has forgotten the request, and will not say `Told`.
@pytest.mark.parametrize(
    ("word", "is_read"),
    [
        (Told("r"), False),
        (CancelRequest("r"), False),
        (CancelRequest("r", complete=True), True),
        (CancelRequest("r", 0), True),
    ],
)
def test_given_a_stream_that_has_ended_when_its_gateway_reads_on_or_not_then_it_is_owned_or_there_is_none(
    word: object, is_read: bool
) -> None:
    scheduler = Scheduler()
    scheduler.say(b"g1", message())
    scheduler.run()
    scheduler.say(b"g1", word)
    assert scheduler.claim(b"g2") == Claimed(1, [], is_owned=is_read)


@pytest.mark.parametrize("other", [b"g2", b"g3"])
def test_given_a_claim_when_anybody_asks_then_it_is_owned_until_it_is_given_back(other: bytes) -> None:
    scheduler = Scheduler()
    scheduler.group.paused.set()
    scheduler.say(b"g1", message())
    scheduler.lose(b"g1")
    first = scheduler.claim(b"g2")
    assert (len(first.requests), first.num_tokens) == (1, [[-1]])
    assert scheduler.claim(other) == Claimed(1, [], is_owned=True)
    scheduler.say(b"g3", ReleaseClaim("r"))
    assert scheduler.claim(other).is_owned
    scheduler.say(b"g2", ReleaseClaim("r"))
    assert scheduler.claim(other) == first


def test_given_a_claim_when_its_gateway_is_gone_then_the_next_one_gets_it() -> None:
    """The answer may be lost, or the gateway that asked may die: the request must not be lost with it."""
    scheduler = Scheduler()
    scheduler.group.paused.set()
    scheduler.say(b"g1", message())
    scheduler.lose(b"g1")
    assert len(scheduler.claim(b"g2").requests) == 1
    scheduler.lose(b"g2")
    assert len(scheduler.claim(b"g3").requests) == 1


def test_given_a_stream_that_was_taken_over_when_sent_by_another_gateway_too_then_that_one_is_refused() -> None:
    scheduler = Scheduler()
    scheduler.group.paused.set()
    scheduler.say(b"g1", message())
    scheduler.lose(b"g1")
    (request,) = scheduler.claim(b"g2").requests
    scheduler.say(b"g2", request)
    scheduler.say(b"g3", request)
    (refused,) = scheduler.heard(b"g3", RequestRejected)
    assert isinstance(refused, RequestRejected)
    assert (refused.status, refused.code) == (400, "request_id_in_use")


def test_given_tokens_found_in_the_cache_when_gateways_die_then_their_number_stays_the_first_one() -> None:
    scheduler = Scheduler()
    scheduler.say(b"g1", message("before", aliases=[], answer="", prompt_token_ids=PROMPT[:5]))
    scheduler.run()
    scheduler.say(b"g1", message())
    scheduler.run()
    for gateway, heir in ((b"g1", b"g2"), (b"g2", b"g3")):
        outputs = [o for batch in scheduler.heard(gateway, OutputBatch) for o in batch.outputs]  # type: ignore[attr-defined]
        assert {output.num_cached_tokens for output in outputs if output.request_id == "r"} == {4}
        scheduler.lose(gateway)
        (request,) = scheduler.claim(heir).requests
        assert request.num_cached_tokens == 4
        scheduler.say(heir, request)
        scheduler.run()


def test_given_a_request_that_has_not_begun_when_claimed_then_nothing_is_said_of_the_cache() -> None:
    assert as_message(running(message()), 101.0).num_cached_tokens == -1
