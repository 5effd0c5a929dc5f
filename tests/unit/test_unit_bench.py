"""The benchmarks' own arithmetic, their workloads, and their HTTP client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import report, workloads
from bench.http_stream import RequestError, Target
from bench.overload import jain_index
from bench.refusals import BARE, GATEWAY, NONE, Window, figures_of
from bench.serving import Load, Measured, meets, parse_goodput, run, send, summary
from bench.tenants import Seen

pytestmark = pytest.mark.unit

ALL_AT_ONCE = Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=None)
ITEM = workloads.Item([1, 2, 3], 3)


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text: str) -> bytes:
    return event({"choices": [{"text": text}]})


USAGE = event({"choices": [], "usage": {"completion_tokens": 3}})
DONE = event(b"[DONE]")
OK_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK_PLAIN = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes, seen: list[bytes] | None = None) -> AsyncIterator[Target]:
    """A server that gives every connection the same bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if seen is not None:
            seen.append(head + body)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")


def ask(answer: bytes, seen: list[bytes] | None = None) -> Measured:
    async def go() -> Measured:
        async with answering(answer, seen) as target:
            return await send(target, "m", ITEM, ALL_AT_ONCE)

    return asyncio.run(go())


def test_the_fields_workload_when_drawn_then_it_is_the_one_of_nano_vllm() -> None:
    random.seed(0)
    prompts = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    items = workloads.shared(10_001)
    assert [item.prompt_token_ids for item in items] == prompts
    assert [item.max_tokens for item in items] == outputs
    small = workloads.shared(2048)
    assert [len(item.prompt_token_ids) for item in small] == [len(prompt) for prompt in prompts]
    assert max(max(item.prompt_token_ids) for item in small) < 2048


def test_a_workload_when_named_then_its_requests_have_those_lengths() -> None:
    fixed = workloads.parse("fixed:7:3", 100, 5)
    assert [(len(item.prompt_token_ids), item.max_tokens) for item in fixed] == [(7, 3)] * 5
    prefixed = workloads.parse("prefix:8:2:4", 100, 3)
    assert len({tuple(item.prompt_token_ids[:8]) for item in prefixed}) == 1
    assert len({tuple(item.prompt_token_ids[8:]) for item in prefixed}) == 3
    assert workloads.parse("fixed:7:3", 100, 5) == fixed, "the same seed gives the same work"
    for wrong in ("shared:1", "fixed:1", "other", "prefix:1:2"):
        with pytest.raises(ValueError, match="is not shared"):
            workloads.parse(wrong, 100, None)


PIECES = (token("a"), b": keep-alive\n\n" + token("b")[:9], token("b")[9:] + token("c"), USAGE + DONE)


@pytest.mark.parametrize(
    "answer", [OK_PLAIN + b"".join(PIECES), OK_CHUNKED + chunked(*PIECES)], ids=["plain", "chunked"]
)
def test_a_stream_when_it_ends_well_then_its_events_and_usage_are_measured(answer: bytes) -> None:
    seen: list[bytes] = []
    measured = ask(answer, seen)
    assert measured.error == ""
    assert (measured.input_len, measured.output_len, len(measured.itls)) == (3, 3, 2)
    assert 0 < measured.ttft <= measured.latency
    assert b"Authorization: Bearer key" in seen[0]
    assert json.loads(seen[0].split(b"\r\n\r\n")[1])["ignore_eos"] is True


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'HTTP/1.1 503 Busy\r\n\r\n{"error": "full"}', "HTTP 503"),
        (OK_PLAIN + token("a"), "broke off"),
        (OK_CHUNKED + b"20\r\ndata: {", "IncompleteRead"),
        (OK_PLAIN + event({"error": {"message": "engine"}}), "engine"),
        (OK_PLAIN + event(b"{nonsense"), "JSONDecodeError"),
        (b"", "IncompleteRead"),
    ],
)
def test_a_stream_when_it_ends_badly_then_the_request_has_failed_and_says_how(answer: bytes, words: str) -> None:
    assert words in ask(answer).error


def test_a_server_that_is_not_there_when_asked_then_the_request_has_failed() -> None:
    async def go() -> None:
        async for _ in Target("http://127.0.0.1:1").events("/v1/completions", {}):
            raise AssertionError("nobody answers there")

    with pytest.raises(RequestError, match="cannot connect"):
        asyncio.run(go())


def test_a_load_with_a_limit_when_run_then_every_item_is_answered_in_order() -> None:
    items = [workloads.Item([1] * length, 3) for length in (5, 6, 7)]

    async def go() -> list[Measured]:
        async with answering(OK_PLAIN + token("a") + USAGE + DONE) as target:
            return await run(target, "m", items, Load(request_rate=1000.0, burstiness=2.0, max_concurrency=1))

    results = asyncio.run(go())
    assert [result.input_len for result in results] == [5, 6, 7]
    assert not any(result.error for result in results)


def test_figures_when_summed_up_then_failed_requests_do_not_count() -> None:
    good = Measured(input_len=10, output_len=3, ttft=0.1, latency=0.3, itls=[0.05, 0.15])
    slow = Measured(input_len=20, output_len=2, ttft=0.4, latency=1.4, itls=[1.0])
    bad = Measured(input_len=30, error="HTTP 503")
    figures = summary([good, slow, bad], duration=2.0, goodput={"ttft": 200.0, "e2el": 500.0})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 5)
    assert figures["request_throughput"] == 1.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(250.0)
    assert figures["median_tpot_ms"] == pytest.approx((100.0 + 1000.0) / 2)
    assert figures["mean_itl_ms"] == pytest.approx(400.0)
    assert figures["p99_e2el_ms"] == pytest.approx(300.0 + 0.99 * 1100.0)


def test_percentiles_when_few_values_then_they_are_interpolated_and_none_gives_0() -> None:
    assert report.percentile([], 99) == 0.0
    assert report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert report.percentile([0.0, 10.0], 75) == 7.5


def test_jains_index_when_all_are_equal_or_one_has_all_then_it_is_1_or_one_part() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 0.0


def test_a_refusal_when_read_then_its_status_and_headers_are_known() -> None:
    async def go() -> RequestError:
        async with answering(b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\n\r\n") as target:
            with pytest.raises(RequestError) as caught:
                await anext(target.events("/v1/completions", {}))
            return caught.value

    error = asyncio.run(go())
    assert (error.status, error.headers) == (503, {"retry-after": "3"})


def test_goodput_limits_when_parsed_then_only_known_metrics_pass() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    assert meets(Measured(1, output_len=3, ttft=0.1, latency=0.2), {"tpot": 50.0})
    assert not meets(Measured(1, output_len=3, ttft=0.1, latency=0.21), {"tpot": 50.0})
    with pytest.raises(ValueError, match="not 'itl'"):
        parse_goodput(["itl:3"])


def test_a_result_when_written_then_it_names_commit_and_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    report.write({"kind": "test", "duration": 1.5}, str(path))
    written = json.loads(path.read_text())
    assert {"commit", "version", "date", "machine", "duration"} <= set(written)
    assert written["machine"]["cores"] >= 1
    assert "1.50" in capsys.readouterr().out


def test_given_windows_in_turns_when_they_are_compared_then_each_with_those_beside_it() -> None:
    def window(refuses: str, rate: float, load: float) -> Window:
        return Window(refuses, rate, {"load": load, "idle": 0.0} | ({"late": 1.0} if refuses == BARE else {}))

    first = [window(NONE, 100.0, 0.1), window(BARE, 96.0, 0.2), window(GATEWAY, 90.0, 0.2)]
    second = [window(GATEWAY, 50.0, 0.3), window(BARE, 40.0, 0.4), window(NONE, 50.0, 0.1)]
    seen = Seen(refusals=[0.001, 0.003])
    found = figures_of(Seen(failures=["one"]), [*first, *second], [seen, Seen()])
    assert [found[f"goodput_ratio_gateway_{kind}"] for kind in ("least", "median", "most")] == [0.9, 0.95, 1.0]
    assert found["goodput_ratio_gateway_of_sums"] == pytest.approx(140 / 150)
    assert found["goodput_ratio_bare_median"] == pytest.approx(0.88)
    assert found["goodput_ratio_gateway_of_bare_most"] == pytest.approx(1.25)
    cores = [found[f"cores load, refusals by {kind}"] for kind in (NONE, BARE, GATEWAY)]
    assert cores == pytest.approx([0.1, 0.3, 0.25])
    assert (found["refused"], found["failed_requests"], found["median_refusal_ms"]) == (2, 1, 2.0)
    assert not any("idle" in name or "late" in name for name in found)
