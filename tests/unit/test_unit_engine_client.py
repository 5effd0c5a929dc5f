"""The engine client against a scripted scheduler over real ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from novainfer.client import engine_link
from novainfer.client.engine_client import EngineClient
from novainfer.client.stream import RequestStream, StreamItem
from novainfer.errors import EngineError, InvalidRequestError, OverloadedError
from novainfer.protocol.messages import FINISH_CANCELLED, AddRequest, OutputBatch, RequestRejected, TokenOutput
from novainfer.sampling.params import SamplingParams
from novainfer.transport.addresses import Endpoint
from tests.fakes import ScriptedScheduler, oracle_tokens
from tests.replica import ReplicaThread

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

VOCAB = 100


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedScheduler]:
    scripted = ScriptedScheduler(Endpoint(f"ipc://{tmp_path}/s"), vocab_size=VOCAB)
    yield scripted
    scripted.close()


def with_client(scheduler: ScriptedScheduler | ReplicaThread, body: Callable[[EngineClient], Awaitable[None]]) -> None:
    """Run `body` with a ready client in a fresh event loop; afterwards nothing may be live in it."""

    async def main() -> None:
        client = EngineClient(scheduler.endpoint, gateway_id="gateway-0", lost_timeout=1.0)
        await client.start()
        try:
            async with asyncio.timeout(30):
                await client.wait_ready()
                await body(client)
            assert client.num_live == 0
        finally:
            await client.close()

    asyncio.run(main())


async def in_thread(work: Callable[[], None]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, work)


def request(request_id: str = "r", n: int = 1, max_tokens: int = 8, **params: object) -> AddRequest:
    settings = SamplingParams(n=n, max_tokens=max_tokens, seed=5, **params)  # type: ignore[arg-type]
    return AddRequest(request_id, [1, 2, 3], settings, eos_token_ids=[0])


async def items_of(stream: RequestStream) -> AsyncIterator[StreamItem]:
    while not stream.finished:
        await stream.wait()
        for item in stream.take_ready():
            yield item


async def read(
    stream: RequestStream, tokens: dict[tuple[str, int], list[int]] | None = None
) -> dict[tuple[str, int], list[int]]:
    tokens = {} if tokens is None else tokens
    async for item in items_of(stream):
        assert isinstance(item, TokenOutput)
        have = tokens.setdefault((item.request_id, item.choice), [])
        assert item.index == len(have)
        have += item.token_ids
    return tokens


def test_given_several_requests_when_submitted_together_then_every_token_comes_once(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        requests = [request("a", n=2), request("b")]
        tokens = await read(client.submit(*requests))
        expected = {(r.request_id, c): oracle_tokens(r, c, 8, VOCAB) for r in requests for c in range(r.params.n)}
        assert tokens == expected

    with_client(scheduler, body)


def test_given_many_requests_in_one_turn_of_the_loop_when_sent_then_they_share_few_messages_and_keep_their_order(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        names = [f"r{number}" for number in range(150)]
        scheduler.message_sizes.clear()
        streams = [client.submit(request(name, max_tokens=1)) for name in names]
        for stream in streams:
            await read(stream)
        assert [added.request_id for added in scheduler.added] == names
        most = engine_link.PACKETS_PER_MESSAGE
        sizes = [size for size in scheduler.message_sizes if size > 1]
        assert sizes[:2] == [most, most]
        assert len(sizes) == 3

    with_client(scheduler, body)


def test_given_a_cancel_in_the_last_turn_when_the_client_closes_then_the_scheduler_has_heard_it(
    scheduler: ScriptedScheduler,
) -> None:
    scheduler.paused.set()

    async def body(client: EngineClient) -> None:
        client.submit(request())
        await in_thread(lambda: scheduler.wait_for(lambda: "r" in scheduler.live))
        client.cancel("r")

    with_client(scheduler, body)
    scheduler.wait_for(lambda: [cancel.request_id for cancel in scheduler.cancelled] == ["r"])


def test_given_a_slow_reader_when_it_reads_then_outputs_are_merged(scheduler: ScriptedScheduler) -> None:
    async def body(client: EngineClient) -> None:
        stream = client.submit(request(max_tokens=20, logprobs=1))
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 20))
        while client.num_live:
            await asyncio.sleep(0)
        items = [item async for item in items_of(stream)]
        assert len(items) == 1
        assert isinstance(items[0], TokenOutput)
        assert (len(items[0].token_ids), len(items[0].logprobs), items[0].finish_reason) == (20, 20, "length")

    with_client(scheduler, body)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidRequestError), (429, OverloadedError), (503, OverloadedError), (500, EngineError)]
)
def test_given_a_refusal_when_read_then_it_is_raised(scheduler: ScriptedScheduler, status: int, kind: type) -> None:
    scheduler.reject = lambda r: RequestRejected(r.request_id, status, "no", retry_after=3.0)

    async def body(client: EngineClient) -> None:
        with pytest.raises(kind, match="no"):
            await read(client.submit(request()))

    with_client(scheduler, body)


def test_given_an_error_output_when_read_then_engine_error_after_the_tokens(scheduler: ScriptedScheduler) -> None:
    async def body(client: EngineClient) -> None:
        scheduler.tokens_before_pause = 2
        stream = client.submit(request())
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 2))
        fail = TokenOutput("r", 0, 2, [], "error", error="bad row")
        scheduler.run_in_thread(lambda: scheduler.send_all(OutputBatch(1, 9, [fail])))
        with pytest.raises(EngineError, match="bad row"):
            await read(stream)

    with_client(scheduler, body)


def test_given_an_alias_when_another_gateway_cancels_then_only_its_own_tenant_may(scheduler: ScriptedScheduler) -> None:
    scheduler.tokens_before_pause = 2

    async def body(client: EngineClient) -> None:
        other = EngineClient(scheduler.endpoint, gateway_id="gateway-1")
        await other.start()
        try:
            await other.wait_ready()
            stream = client.submit(replace(request(), tenant="a", aliases=["chat", "http"]))
            # Nothing orders what two gateways send: the one's cancel may overtake the other's request.
            await in_thread(lambda: scheduler.wait_for(lambda: "r" in scheduler.live))
            assert not await other.cancel_alias("http", "b")
            assert not await other.cancel_alias("nothing", "a")
            assert await other.cancel_alias("http", "a")
            ends = [item.finish_reason async for item in items_of(stream) if isinstance(item, TokenOutput)]
            assert ends[-1] == FINISH_CANCELLED
            assert not await other.cancel_alias("chat", "a")
        finally:
            await other.close()

    with_client(scheduler, body)


def test_given_a_silent_engine_when_an_alias_is_cancelled_then_overloaded(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "ANSWER_SECONDS", 0.1)

    async def body(client: EngineClient) -> None:
        await in_thread(scheduler.close)
        with pytest.raises(OverloadedError):
            await client.cancel_alias("chat", "a")

    with_client(scheduler, body)


def test_given_a_cancel_when_one_choice_then_the_other_goes_on(scheduler: ScriptedScheduler) -> None:
    async def body(client: EngineClient) -> None:
        scheduler.tokens_before_pause = 2
        wanted = request(n=2)
        stream = client.submit(wanted)
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 2))
        stream.cancel("r", 0)
        scheduler.tokens_before_pause = None
        tokens = await read(stream)
        assert tokens[("r", 1)] == oracle_tokens(wanted, 1, 8, VOCAB)
        assert len(tokens[("r", 0)]) <= 2
        await in_thread(lambda: scheduler.wait_for(lambda: [c.choice for c in scheduler.cancelled] == [0]))

    with_client(scheduler, body)


def test_given_a_live_stream_when_closed_then_the_scheduler_frees_it(scheduler: ScriptedScheduler) -> None:
    async def body(client: EngineClient) -> None:
        scheduler.tokens_before_pause = 1
        stream = client.submit(request())
        await in_thread(lambda: scheduler.wait_for(lambda: "r" in scheduler.live))
        stream.close()
        stream.close()
        await in_thread(lambda: scheduler.wait_for(lambda: not scheduler.live and len(scheduler.cancelled) == 1))

    with_client(scheduler, body)


def test_given_a_scheduler_restart_when_streams_are_live_then_they_go_on_token_for_token(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        scheduler.tokens_before_pause = 3
        requests = [request("a", n=2), request("b", max_tokens=5)]
        stream = client.submit(*requests)
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 3))
        scheduler.restart()
        await in_thread(lambda: scheduler.wait_for(lambda: len(scheduler.live) == 2))
        scheduler.tokens_before_pause = None
        tokens = await read(stream)
        for sent in requests:
            for c in range(sent.params.n):
                assert tokens[(sent.request_id, c)] == oracle_tokens(sent, c, sent.params.max_tokens, VOCAB)
        resumed = [r for r in scheduler.added if r.emitted]
        assert sorted(r.request_id for r in resumed) == ["a", "b"]

    with_client(scheduler, body)


def test_given_workers_that_are_replaced_when_requests_come_then_they_wait_and_nothing_is_sent_twice(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        def recover(ready: bool) -> None:
            scheduler.ready = ready
            scheduler.epoch += not ready
            scheduler._send_info()

        scheduler.tokens_before_pause = 2
        early = client.submit(request("early"))
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 2))
        await in_thread(lambda: scheduler.run_in_thread(lambda: recover(False)))
        while client.ready:
            await asyncio.sleep(0)
        late = client.submit(request("late"))
        await in_thread(lambda: scheduler.wait_for(lambda: "late" in scheduler.live))
        await in_thread(lambda: scheduler.run_in_thread(lambda: recover(True)))
        scheduler.tokens_before_pause = None
        assert (await read(early))[("early", 0)] == oracle_tokens(request("early"), 0, 8, VOCAB)
        assert (await read(late))[("late", 0)] == oracle_tokens(request("late"), 0, 8, VOCAB)
        assert [r.request_id for r in scheduler.added] == ["early", "late"]

    with_client(scheduler, body)


def test_given_a_scheduler_that_gave_the_gateway_up_when_it_hears_it_again_then_all_is_sent_again_in_the_same_epoch(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        def give_up() -> None:
            scheduler.live.clear()
            scheduler.links.clear()

        scheduler.tokens_before_pause = 3
        stream = client.submit(request())
        await in_thread(lambda: scheduler.wait_for(lambda: scheduler.step >= 3))
        await in_thread(lambda: scheduler.run_in_thread(give_up))
        await in_thread(lambda: scheduler.wait_for(lambda: "r" in scheduler.live))
        scheduler.tokens_before_pause = None
        assert (await read(stream))[("r", 0)] == oracle_tokens(request(), 0, 8, VOCAB)
        assert [len(r.emitted) for r in scheduler.added] == [0, 1]

    with_client(scheduler, body)


def test_given_an_old_epoch_or_a_gap_when_it_speaks_then_only_the_gap_ends_the_request(
    scheduler: ScriptedScheduler,
) -> None:
    async def body(client: EngineClient) -> None:
        scheduler.tokens_before_pause = 0
        stream = client.submit(request())
        await in_thread(lambda: scheduler.wait_for(lambda: "r" in scheduler.live))
        stale = OutputBatch(0, 1, [TokenOutput("r", 0, 0, [9])])
        gap = OutputBatch(1, 1, [TokenOutput("r", 0, 4, [9])])
        scheduler.run_in_thread(lambda: scheduler.send_all(stale))
        scheduler.run_in_thread(lambda: scheduler.send_all(gap))
        with pytest.raises(EngineError, match="broke"):
            await read(stream)
        assert client.num_protocol_errors == 1

    with_client(scheduler, body)


def test_given_bytes_of_no_message_when_received_then_streams_go_on(scheduler: ScriptedScheduler) -> None:
    async def body(client: EngineClient) -> None:
        identity = next(iter(scheduler.links))
        scheduler.run_in_thread(lambda: scheduler._socket.send_multipart([identity, b"\xc1junk"]))
        assert len((await read(client.submit(request())))[("r", 0)]) == 8
        assert client.num_protocol_errors == 1

    with_client(scheduler, body)


def test_given_a_scheduler_that_stays_gone_when_streams_are_live_then_they_end_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "BEAT_SECONDS", 0.05)
    scripted = ScriptedScheduler(Endpoint(f"ipc://{tmp_path}/s"), vocab_size=VOCAB)
    scripted.tokens_before_pause = 1

    async def body(client: EngineClient) -> None:
        stream = client.submit(request())
        await in_thread(scripted.close)
        with pytest.raises(EngineError, match="reached"):
            await read(stream)
        with pytest.raises(OverloadedError):
            client.submit(request("later"))

    with_client(scripted, body)


def test_given_a_new_scheduler_at_the_same_address_when_it_comes_then_it_is_greeted_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "BEAT_SECONDS", 0.05)
    endpoint = Endpoint(f"ipc://{tmp_path}/s")
    first = ScriptedScheduler(endpoint, vocab_size=VOCAB)
    first.tokens_before_pause = 3
    later: list[ScriptedScheduler] = []

    def replace_scheduler() -> None:
        first.wait_for(lambda: first.step >= 3)
        first.close()
        second = ScriptedScheduler(endpoint, vocab_size=VOCAB)
        second.epoch = 2
        later.append(second)

    async def body(client: EngineClient) -> None:
        client.links[0].session._lost_timeout = 30.0
        wanted = request()
        stream = client.submit(wanted)
        await in_thread(replace_scheduler)
        assert (await read(stream))[("r", 0)] == oracle_tokens(wanted, 0, 8, VOCAB)

    try:
        with_client(first, body)
    finally:
        later[0].close()


def with_orphan(tmp_path: Path, body: Callable[[EngineClient], Awaitable[None]]) -> None:
    """`with_client`, of an engine with the stream `r`, alias `x`, of a gateway that is gone."""
    server = ReplicaThread(Endpoint(f"ipc://{tmp_path}/r"), vocab_size=VOCAB)
    try:
        server.leave_behind(replace(request(), aliases=["x"], answer="a stream"))
        with_client(server, body)
    finally:
        server.close()


def test_given_the_answer_to_a_claim_when_who_asked_leaves_as_it_comes_then_what_was_lent_is_given_back(
    tmp_path: Path,
) -> None:
    async def body(client: EngineClient) -> None:
        asking = asyncio.ensure_future(client.claim("x", ""))
        answered = client.links[0].session._answered

        def leave(answer: Any) -> None:
            answered(answer)
            asking.cancel()

        client.links[0].session._answered = leave
        with pytest.raises(asyncio.CancelledError):
            await asking
        client.links[0].session._answered = answered
        assert not (claimed := await client.claim("x", "")).is_owned
        assert [given.request_id for given in claimed.requests] == ["r"]

    with_orphan(tmp_path, body)


def test_given_the_answer_to_a_claim_when_it_comes_too_late_then_what_was_lent_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "ANSWER_SECONDS", 0.01)

    async def body(client: EngineClient) -> None:
        came, answered = asyncio.Queue[Any](), client.links[0].session._answered
        client.links[0].session._answered = came.put_nowait
        with pytest.raises(OverloadedError, match="does not answer"):
            await client.claim("x", "")
        monkeypatch.setattr(engine_link, "ANSWER_SECONDS", 20.0)
        client.links[0].session._answered = answered
        answered(await came.get())
        while (claimed := await client.claim("x", "")).is_owned:
            pass
        assert [given.request_id for given in claimed.requests] == ["r"]

    with_orphan(tmp_path, body)
