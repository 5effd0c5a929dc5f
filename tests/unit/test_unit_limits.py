"""What a gateway lets in: places, queued tokens, each key's quota, the file that sets it, and giving all of it back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import to_api_error
from gateway.limits import Cost, Limits, Permit, Room
from gateway.params import estimate_cost
from gateway.quotas import Quota, TokenBucket, as_duration, quotas_of
from gateway.schemas import ChatRequest, CompletionRequest, parse
from novainfer.config import KeyDigest, ServeConfig, ServerConfig
from novainfer.entrypoints.keys import seal_keys
from novainfer.errors import ConfigError, DeadlineError, InvalidRequestError, OverloadedError

pytestmark = [pytest.mark.unit, pytest.mark.stage2]

ROOM = Room(sequences=80, queued_tokens=8000, retry_after=3.0)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cost_of(prompt_tokens: int, *, sequences: int = 1, prompts: int = 1, output_tokens: int = 0) -> Cost:
    return Cost(prompts, sequences, prompt_tokens, output_tokens)


def status_of(limits: Limits, tenant: str, cost: Cost) -> int:
    """200 and the place is held, or the status of the refusal."""
    try:
        limits.reserve(tenant, cost, ROOM)
    except OverloadedError as error:
        return error.status
    except InvalidRequestError:
        return 400
    return 200


def test_given_queued_tokens_when_they_reach_the_bound_then_503_with_the_engines_estimate() -> None:
    limits = Limits(max_live=100)
    held = limits.reserve("a", cost_of(5000, output_tokens=2000), ROOM)
    with pytest.raises(OverloadedError) as full:
        limits.reserve("a", cost_of(1001), ROOM)
    assert (full.value.status, full.value.retry_after) == (503, 3.0)
    held.correct(4000)  # it was tokenised
    assert limits.queued_tokens == 6000
    other = limits.reserve("a", cost_of(1001), ROOM)
    held.begin()  # and has its first token: it does not wait any more
    assert limits.queued_tokens == 1001
    held.correct(9999)  # too late to matter for the queue
    for permit in (held, other, other):
        permit.release()
    assert (limits.queued_tokens, limits.num_live, limits.num_sequences) == (0, 0, 0)


def test_given_a_request_above_the_whole_bound_when_nothing_waits_then_it_may() -> None:
    limits = Limits(max_live=100)
    held = limits.reserve("a", cost_of(50_000), ROOM)
    assert status_of(limits, "a", cost_of(1)) == 503
    held.release()
    assert status_of(limits, "a", cost_of(1)) == 200


def test_given_less_than_a_128th_of_the_queue_left_when_little_is_asked_for_then_it_is_full() -> None:
    limits = Limits(max_live=100)
    for held, status in ((7938, 200), (7939, 503)):
        permit = limits.reserve("a", cost_of(held), ROOM)
        assert status_of(limits, "a", cost_of(1)) == status
        permit.release()


def test_given_sequences_when_they_fill_queue_and_rows_then_503_and_more_than_all_is_400() -> None:
    limits = Limits(max_live=100)
    assert status_of(limits, "a", cost_of(1, sequences=81)) == 400
    assert status_of(limits, "a", cost_of(1, sequences=80)) == 200
    assert status_of(limits, "a", cost_of(1)) == 503


def test_given_a_tenant_that_fills_the_queue_when_another_comes_then_there_is_room_for_it() -> None:
    limits = Limits(max_live=1000, quotas={"heavy": Quota(), "light": Quota()})
    while status_of(limits, "heavy", cost_of(10)) == 200:
        pass
    assert limits.num_sequences == 70
    assert [status_of(limits, "light", cost_of(10)) for _ in range(11)] == [200] * 10 + [503]
    alone = Limits(max_live=1000, quotas={"heavy": Quota()})
    while status_of(alone, "heavy", cost_of(10)) == 200:
        pass
    assert alone.num_sequences == 80


def test_given_a_quota_when_it_is_used_up_then_429_and_headers_say_what_is_left() -> None:
    clock = Clock()
    quota = Quota(max_requests=3, max_queued=2, tokens_per_minute=6000)
    limits = Limits(max_live=100, quotas={"a": quota}, clock=clock)
    first, second = (limits.reserve("a", cost_of(1000), ROOM) for _ in range(2))
    with pytest.raises(OverloadedError, match="2 requests waiting") as waiting:
        limits.reserve("a", cost_of(1000), ROOM)
    first.begin()
    third = limits.reserve("a", cost_of(1000), ROOM)
    with pytest.raises(OverloadedError, match="3 requests at once") as live:
        limits.reserve("a", cost_of(1000), ROOM)
    assert waiting.value.status == live.value.status == 429
    assert limits.headers("a") == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "333ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "3000",
        "x-ratelimit-reset-tokens": "30s",
    }
    for permit in (first, second, third):
        permit.used_tokens = 1500
        permit.release()
    with pytest.raises(OverloadedError, match="6000 tokens per minute") as tokens:
        limits.reserve("a", cost_of(2000), ROOM)
    assert (tokens.value.status, tokens.value.retry_after) == (429, pytest.approx(5.0))
    clock.now += 5.0
    limits.reserve("a", cost_of(2000), ROOM).release()
    assert limits.headers("b") == {}


def test_given_two_prompts_when_one_has_begun_then_the_request_still_waits() -> None:
    limits = Limits(max_live=10, quotas={"a": Quota(max_queued=2)})
    permit = limits.reserve("a", cost_of(100, prompts=2, sequences=2), ROOM)
    permit.begin()
    assert limits.queued_tokens == 100
    permit.begin()
    assert limits.queued_tokens == 0
    assert status_of(limits, "a", cost_of(1, prompts=2)) == 200
    permit.release()


def test_given_2000_random_ends_when_all_is_over_then_every_count_is_zero() -> None:
    rng = random.Random(7)
    clock = Clock()
    tenants = ["a", "b", "c"]
    quotas = {"a": Quota(5, 3, 60_000), "b": Quota(tokens_per_minute=200_000), "c": Quota()}
    limits = Limits(max_live=40, quotas=quotas, clock=clock)
    live: list[Permit] = []
    ends = refused = 0
    while ends < 2000:
        clock.now += rng.random() / 10
        if rng.random() < 0.6:
            cost = Cost(rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(3000), rng.randrange(500))
            try:
                live.append(limits.reserve(rng.choice(tenants), cost, ROOM))
            except (OverloadedError, InvalidRequestError):
                refused += 1
        elif live:
            permit = live.pop(rng.randrange(len(live)))
            stage = rng.randrange(5)  # refused after all, cancelled or out of time in each stage, or ended well
            if stage >= 1:
                permit.correct(rng.randrange(5000))
            for _ in range(0 if stage < 2 else permit.cost.prompts if stage > 2 else 1):
                permit.begin()
            permit.used_tokens = rng.randrange(4000) if stage > 1 else 0
            for _ in range(rng.randrange(1, 3)):
                permit.release()
            ends += 1
    assert refused > 100
    for permit in live:
        permit.release()
    assert (limits.num_live, limits.num_sequences, limits.queued_tokens) == (0, 0, 0)
    for tenant in tenants:
        account = limits._account(tenant)
        assert (account.live, account.queued, account.sequences, account.queued_tokens) == (0, 0, 0, 0)
    clock.now += 3600
    assert limits.headers("a")["x-ratelimit-remaining-tokens"] == "60000"
    assert limits.headers("a")["x-ratelimit-remaining-requests"] == "5"


def test_given_a_bucket_when_more_than_a_minute_is_asked_then_it_must_be_full_and_goes_below_zero() -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)
    assert bucket.seconds_until(5000) == 0.0
    bucket.take(5000)
    assert bucket.seconds_until(1) == pytest.approx(440.1)
    bucket.take(-10_000)
    assert (bucket.level, bucket.seconds_until_full) == (600, 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (0.25, "250ms"), (1.5, "1.5s"), (59.04, "59s"), (360.0, "6m0s")]
)
def test_given_a_duration_when_written_then_as_openai_writes_it(seconds: float, text: str) -> None:
    assert as_duration(seconds) == text


def test_given_several_gateways_when_a_key_has_limits_then_each_holds_its_part() -> None:
    keys = [KeyDigest("a", "00", 2.0, max_requests=5, tokens_per_minute=1000), KeyDigest("b", "01")]
    assert quotas_of(keys, 2) == {"a": Quota(3, 0, 500), "b": Quota()}
    assert Quota().with_default(4) == Quota(max_requests=4)
    assert Quota(max_requests=2).with_default(4) == Quota(max_requests=2)


@pytest.mark.parametrize(
    ("body", "prompts", "expected"),
    [
        ({"prompt": "x"}, 1, Cost(1, 1, 100, 16)),
        ({"prompt": "x", "max_tokens": 20, "n": 3}, 1, Cost(1, 3, 100, 60)),
        ({"prompt": ["x", "y"], "max_tokens": 9999, "n": 2}, 2, Cost(2, 4, 100, 2000)),
        ({"prompt": "x", "max_tokens": -5, "n": -1}, 1, Cost(1, 1, 100, 0)),
    ],
)
def test_given_a_request_when_its_cost_is_estimated_then_from_its_bytes_and_max_tokens(
    body: dict[str, object], prompts: int, expected: Cost
) -> None:
    request, _ = parse(CompletionRequest, body, strict_params=False)
    assert estimate_cost(request, prompts, 200, 500) == expected
    assert estimate_cost(request, prompts, 10**6, 500).prompt_tokens == 500 * prompts


def test_given_a_chat_when_its_cost_is_estimated_then_only_a_limit_that_was_given_counts() -> None:
    for body, tokens in (({}, 0), ({"max_tokens": 7}, 7), ({"max_tokens": 7, "max_completion_tokens": 5}, 5)):
        messages = [{"role": "user", "content": "x"}]
        request, _ = parse(ChatRequest, {"messages": messages, **body}, strict_params=False)
        assert estimate_cost(request, 1, 64, 500) == Cost(1, 1, 32, tokens)


def test_given_request_ids_when_refused_together_then_they_are_told_other_times_and_each_the_same_again() -> None:
    error = OverloadedError("full", retry_after=10.0)
    told = [int(to_api_error(error, f"id-{i}").headers["retry-after-ms"]) for i in range(50)]
    assert told == [int(to_api_error(error, f"id-{i}").headers["retry-after-ms"]) for i in range(50)]
    assert len(set(told)) > 40
    assert all(10_000 <= ms <= 12_500 for ms in told)
    assert to_api_error(OverloadedError("full", retry_after=0.0)).headers["retry-after"] == "1"
    assert to_api_error(DeadlineError("late")).headers == {"x-should-retry": "false"}


# -- the key file ------------------------------------------------------------------------------------------------


def keys_of(path: Path, text: str) -> tuple[KeyDigest, ...]:
    path.write_text(text, encoding="utf-8")
    return seal_keys(ServeConfig(server=ServerConfig(api_key_file=str(path)))).keys


def test_given_a_key_file_when_read_then_words_after_the_key_are_its_weight_and_limits(tmp_path: Path) -> None:
    words = "weight=2.5 max-requests=8 max-queued=4 tokens-per-minute=60000"
    text = f"team a: secret==  {words}\nold\nname:other max-queued=1\n"
    first, old, other = keys_of(tmp_path / "keys", text)
    assert replace(first, sha256="") == KeyDigest("team a", "", 2.5, 8, 4, 60_000)
    assert replace(old, tenant="", sha256="") == KeyDigest("", "")
    assert (other.tenant, other.max_queued, other.weight) == ("name", 1, 1.0)
    plain = keys_of(tmp_path / "keys", "team a:secret==\n")
    assert plain[0].sha256 == first.sha256


@pytest.mark.parametrize(
    "line",
    ["a:key wieght=2", "a:key weight", "a:key weight=0", "a:key weight=nan", "a:key weight=inf", "a:key max-queued=-1",
     "a:key max-queued=1.5", "a:key weight=1 weight=1", "a:key other-key", "a: ", "a:k1 weight=2\na:k2"],
)  # fmt: skip
def test_given_a_key_file_with_a_fault_when_read_then_the_line_is_named_and_no_key(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path / "keys", f"# first\n{line}\n")
    assert "other-key" not in str(caught.value)
    assert "2" in str(caught.value) or "different limits" in str(caught.value)


def test_given_two_keys_of_one_tenant_when_they_say_the_same_then_both_open(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "keys", "a:k1 max-requests=3\na:k2 max-requests=3\n")
    assert [key.tenant for key in keys] == ["a", "a"]
    assert ServeConfig.from_json(ServeConfig(keys=keys).to_json()).keys == keys


def test_given_an_answer_that_is_only_left_to_be_sent_when_narrowed_then_one_place_is_held_until_the_end() -> None:
    limits = Limits(max_live=10)
    room = Room(sequences=10, queued_tokens=1000, retry_after=1.0)
    permit = limits.reserve("a", cost_of(100, sequences=8, prompts=8), room)
    permit.begin()
    permit.narrow()
    assert (limits.num_live, limits.num_sequences, limits.queued_tokens, limits.live_by_tenant) == (1, 1, 0, {"a": 1})
    permit.narrow()
    permit.begin()
    limits.reserve("b", cost_of(100, sequences=9, prompts=9), room).release()
    permit.release()
    assert (limits.num_live, limits.num_sequences, limits.queued_tokens, limits.live_by_tenant["a"]) == (0, 0, 0, 0)


def test_given_a_tenants_own_limits_when_asked_how_many_prompts_it_may_have_at_once_then_the_least_counts() -> None:
    quotas = {"a": Quota(max_requests=8), "b": Quota(max_requests=8, max_queued=3)}
    limits = Limits(max_live=100, quotas=quotas)
    assert [limits.most_at_once(name, 64) for name in ("a", "b", "c")] == [8, 3, 64]
    assert limits.most_at_once("a", 2) == 2
