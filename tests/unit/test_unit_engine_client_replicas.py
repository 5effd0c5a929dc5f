"""The engine client over several schedulers: the real `Replica` on the oracle's rows, over real ZeroMQ."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from novainfer.client import engine_client, engine_link
from novainfer.client.engine_client import DRAINED, LOST, EngineClient
from novainfer.client.stream import RequestStream
from novainfer.errors import EngineError, OverloadedError
from novainfer.protocol.messages import FINISH_LENGTH, AddRequest, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.sim.oracle import oracle_stream
from novainfer.transport.addresses import Endpoint
from novainfer.transport.replicas import DRAINING, IN, OUT
from tests.replica import ReplicaThread

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

VOCAB = 100
LENGTH = 24


@pytest.fixture
def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReplicaThread]]:
    monkeypatch.setattr(engine_link, "BEAT_SECONDS", 0.05)
    threads = [ReplicaThread(Endpoint(f"ipc://{tmp_path}/s{number}"), vocab_size=VOCAB) for number in range(3)]
    yield threads
    for thread in threads:
        thread.group.paused.clear()
        thread.close()


def endpoints(replicas: list[ReplicaThread], *numbers: int) -> dict[int, Endpoint]:
    return {number: replicas[number].endpoint for number in numbers}


def with_client(
    replicas: list[ReplicaThread],
    body: Callable[[EngineClient], Awaitable[None]],
    *numbers: int,
    drain_timeout: float = 0.0,
) -> None:
    """Run `body` with a client of replicas 0 and 1 (or these), all of them ready."""

    async def main() -> None:
        chosen = endpoints(replicas, *(numbers or (0, 1)))
        client = EngineClient(chosen, gateway_id="gateway-0", lost_timeout=5.0, drain_timeout=drain_timeout)
        await client.start()
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                while not all(link.is_ready and link.session.stats for link in client.links.values()):
                    await asyncio.sleep(0.01)
                await body(client)
            assert client.num_live == 0
        finally:
            await client.close()

    asyncio.run(main())


def request(name: str, *, n: int = 1, tenant: str = "", answer: str = "") -> AddRequest:
    params = SamplingParams(n=n, max_tokens=LENGTH, seed=7, ignore_eos=True)
    return AddRequest(name, [1, 2, 3], params, tenant=tenant, aliases=[f"alias-{name}"], answer=answer)


def expected(n: int) -> list[list[int]]:
    params = request("any", n=n).params
    return [oracle_stream([1, 2, 3], params, choice, [], VOCAB) for choice in range(n)]


async def read(stream: RequestStream, until: int = LENGTH) -> dict[int, list[int]]:
    """Tokens by choice; each must be the next one. Stops when a choice has `until` of them, or all has ended."""
    tokens: dict[int, list[int]] = {}
    while not stream.finished and max(map(len, tokens.values()), default=0) < until:
        await stream.wait()
        for item in stream.take_ready():
            assert isinstance(item, TokenOutput)
            have = tokens.setdefault(item.choice, [])
            assert item.index == len(have), "a token came twice, or not at all"
            have += item.token_ids
            assert item.finish_reason in (None, FINISH_LENGTH)
    return tokens


async def rest(stream: RequestStream, begun: dict[int, list[int]]) -> list[list[int]]:
    """All tokens of each choice, of which some have been read."""
    while not stream.finished:
        await stream.wait()
        for item in stream.take_ready():
            assert isinstance(item, TokenOutput)
            have = begun.setdefault(item.choice, [])
            assert item.index == len(have), "a token came twice, or not at all"
            have += item.token_ids
    return [begun[choice] for choice in sorted(begun)]


async def submit_until_both_have_some(client: EngineClient, count: int = 8) -> list[RequestStream]:
    streams = [client.submit(request(f"r{number}", n=2)) for number in range(count)]
    assert all(client.live_by_replica.values())
    return streams


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_given_replicas_with_room_for_contexts_of_different_lengths_when_asked_then_the_shortest_holds(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        sessions = [link.session for link in client.links.values()]
        for session in sessions:
            limits = session.limits
            assert limits is not None
            session.limits = dataclasses.replace(limits, max_model_len=limits.max_model_len - 1)
            assert client.limits is session.limits
            session.limits = limits

    with_client(replicas, body)


def test_requests_when_there_are_two_replicas_then_both_get_some_and_every_token_comes_once(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        for stream in await submit_until_both_have_some(client):
            assert await rest(stream, {}) == expected(2)
            stream.close()
        assert sum(client.totals.routed.values()) == 8

    with_client(replicas, body)


@pytest.mark.parametrize("how", ["silent", "out", "gone"])
def test_live_requests_when_their_replica_is_lost_then_they_go_on_elsewhere_at_the_next_token(
    replicas: list[ReplicaThread], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(engine_client, "MOVE_SECONDS", 0.1)
    monkeypatch.setattr("novainfer.client.session.SILENCE_BEFORE_UNREADY", 0.3)

    async def body(client: EngineClient) -> None:
        replicas[0].group.paused.set()
        replicas[1].group.paused.set()
        streams = await submit_until_both_have_some(client)
        lost = client.live_by_replica[0]
        if how == "silent":
            replicas[0].close()
        elif how == "out":
            await client.follow(endpoints(replicas, 0, 1), {0: OUT, 1: IN})
        else:
            await client.follow(endpoints(replicas, 1), {1: IN})
        await until(lambda: client.live_by_replica.get(0, 0) == 0)
        assert client.live_by_replica[1] == 8
        assert client.totals.moved == {DRAINED if how == "gone" else LOST: lost}
        replicas[1].group.paused.clear()
        for stream in streams:
            assert await rest(stream, {}) == expected(2)
            stream.close()

    with_client(replicas, body)


def test_live_requests_when_they_move_in_midstream_then_no_token_is_lost_or_doubled(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        streams = [client.submit(request(f"r{number}", n=2)) for number in range(8)]
        begun = [await read(stream, until=1 + number % 5) for number, stream in enumerate(streams)]
        for round_ in range(6):  # there and back again
            out = round_ % 2
            await client.follow(endpoints(replicas, 0, 1), {out: OUT, 1 - out: IN})
            await asyncio.sleep(0)
        for stream, tokens in zip(streams, begun, strict=True):
            assert await rest(stream, tokens) == expected(2)
            stream.close()

    with_client(replicas, body)


def test_a_draining_replica_when_its_time_is_over_then_what_it_has_moves_and_nothing_new_comes(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        replicas[0].group.paused.set()
        streams = await submit_until_both_have_some(client)
        held = client.live_by_replica[0]
        await client.follow(endpoints(replicas, 0, 1), {0: DRAINING, 1: IN})
        assert client.live_by_replica[0] == held
        streams += [client.submit(request(f"new{number}", n=2)) for number in range(4)]
        assert client.live_by_replica[0] <= held
        for stream in streams:
            assert await rest(stream, {}) == expected(2)
            stream.close()
        assert client.totals.moved == {DRAINED: held}

    with_client(replicas, body, drain_timeout=0.2)


def test_a_replica_when_it_is_added_then_it_gets_requests(replicas: list[ReplicaThread]) -> None:
    async def body(client: EngineClient) -> None:
        await client.follow(endpoints(replicas, 0, 1, 2), {0: DRAINING, 1: DRAINING, 2: IN})
        await until(lambda: client.links[2].is_ready)
        stream = client.submit(request("r"))
        assert client.live_by_replica == {0: 0, 1: 0, 2: 1}
        assert await rest(stream, {}) == expected(1)
        stream.close()

    with_client(replicas, body)


def test_the_only_replica_that_serves_when_it_is_lost_then_requests_wait_and_new_ones_are_taken(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        replicas[0].group.paused.set()
        streams = [client.submit(request("r"))]
        await client.follow(endpoints(replicas, 0), {0: OUT})
        assert not client.ready
        streams.append(client.submit(request("later")))
        replicas[0].group.paused.clear()
        await client.follow(endpoints(replicas, 0), {0: IN})
        for stream in streams:
            assert await rest(stream, {}) == expected(1)
            stream.close()

    with_client(replicas, body, 0)


def test_all_replicas_when_they_stay_silent_then_their_requests_end_with_an_error(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        for replica in replicas[:2]:
            replica.group.paused.set()
        streams = await submit_until_both_have_some(client)
        for replica in replicas[:2]:
            replica.close()
        for stream in streams:
            with pytest.raises(EngineError, match="reached"):
                await rest(stream, {})
            stream.close()
        with pytest.raises(OverloadedError):
            client.submit(request("new"))

    with_client(replicas, body)


def test_requests_when_cancelled_by_an_alias_then_they_are_found_wherever_they_are(
    replicas: list[ReplicaThread],
) -> None:
    async def body(client: EngineClient) -> None:
        for replica in replicas[:2]:
            replica.group.paused.set()
        streams = await submit_until_both_have_some(client)
        for number in range(8):
            assert await client.cancel_alias(f"alias-r{number}", "")
        assert not await client.cancel_alias("alias-r0", "somebody else")
        for replica in replicas[:2]:
            replica.group.paused.clear()
        for stream in streams:
            while not stream.finished:
                await stream.wait()
                stream.take_ready()
            stream.close()

    with_client(replicas, body)


def test_a_stream_that_a_dead_gateway_left_when_claimed_then_the_replica_that_has_it_goes_on(
    replicas: list[ReplicaThread],
) -> None:
    replicas[1].leave_behind(request("left", answer="x"), num_tokens=3)

    async def body(client: EngineClient) -> None:
        claimed = await client.claim("alias-left", "")
        assert [given.request_id for given in claimed.requests] == ["left"]
        client.release(claimed.requests)
        while (claimed := await client.claim("alias-left", "")).is_owned:
            pass
        stream = client.submit(*claimed.requests)
        assert client.live_by_replica == {0: 0, 1: 1}
        assert await rest(stream, {}) == expected(1)
        stream.close()
        assert (await client.claim("alias-none", "")).requests == []

    with_client(replicas, body)


def test_a_claimed_stream_when_its_replica_is_lost_before_it_is_submitted_then_another_goes_on_with_its_tokens(
    replicas: list[ReplicaThread],
) -> None:
    replicas[1].leave_behind(request("left", answer="x"), num_tokens=3)

    async def body(client: EngineClient) -> None:
        claimed = await client.claim("alias-left", "")
        await client.follow(endpoints(replicas, 0, 1), {0: IN, 1: OUT})
        stream = client.submit(*claimed.requests)
        assert client.live_by_replica[0] == 1
        assert await rest(stream, {}) == expected(1)
        stream.close()

    with_client(replicas, body)
