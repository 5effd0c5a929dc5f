"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from novainfer.client.router import CHUNK, HOW_LOAD, HOW_ONLY, HOW_PREFIX, MAX_CHUNKS, SEQUENCE_COST, Load, Router
from novainfer.client.router import MAX_KEPT as KEPT
from novainfer.protocol.messages import AddRequest
from novainfer.sampling.params import SamplingParams

pytestmark = pytest.mark.unit


def request(name: str, token_ids: list[int], **fields: object) -> AddRequest:
    return AddRequest(name, token_ids, SamplingParams(max_tokens=4), **fields)  # type: ignore[arg-type]


def text(number: int, chunks: int) -> list[int]:
    """A prompt of so many chunks, all of them its own."""
    return [number * 1000 + i % 997 for i in range(chunks * CHUNK)]


def idle(count: int) -> list[Load]:
    return [Load(number, 0) for number in range(count)]


def test_a_prompt_when_it_comes_again_then_it_goes_where_its_beginning_is_cached() -> None:
    router = Router()
    for number in range(50):
        first = router.route(request(f"a{number}", text(number, 4)), idle(8))
        again = router.route(request(f"b{number}", [*text(number, 3), *text(99, 2)]), idle(8))
        assert (again.replica, again.how, again.num_cached) == (first.replica, HOW_PREFIX, 3 * CHUNK)


def test_prompts_of_one_beginning_when_the_holder_is_loaded_then_they_go_elsewhere_and_are_held_there_too() -> None:
    router = Router()
    home = router.route(request("a", text(1, 4)), idle(4)).replica
    just_worth_it = [Load(n, 4 * CHUNK // SEQUENCE_COST if n == home else 0) for n in range(4)]
    assert router.route(request("b", text(1, 4)), just_worth_it).replica == home
    loaded = [replace(load, num_sequences=load.num_sequences + (load.replica == home)) for load in just_worth_it]
    spilt = router.route(request("c", text(1, 4)), loaded)
    assert spilt.replica != home
    assert spilt.how == HOW_LOAD
    assert router.route(request("d", text(1, 4)), loaded).how == HOW_PREFIX


def test_prompts_without_a_common_beginning_when_routed_then_all_replicas_get_their_part() -> None:
    router = Router()
    counts: Counter[int] = Counter()
    for number in range(800):
        loads = [Load(n, counts[n]) for n in range(8)]
        counts[router.route(request(f"r{number}", text(number, 1)), loads).replica] += 1
    assert min(counts.values()) > 80
    assert max(counts.values()) < 120


def test_two_gateways_when_they_know_nothing_then_they_send_one_beginning_to_one_home() -> None:
    for number in range(40):
        chosen = {Router().route(request(f"{name}", text(number, 2)), idle(8)).replica for name in "abcdefgh"}
        assert len(chosen) == 1


def test_tenants_and_salts_when_they_differ_then_equal_prompts_share_nothing() -> None:
    router = Router()
    router.route(request("a", text(1, 4), tenant="x"), idle(2))
    assert router.route(request("b", text(1, 4), tenant="y"), idle(2)).how == HOW_LOAD
    assert router.route(request("c", text(1, 4), tenant="x", cache_salt="s"), idle(2)).how == HOW_LOAD
    assert router.route(request("d", text(1, 4), tenant="x"), idle(2)).how == HOW_PREFIX


def test_a_tenant_when_it_has_much_in_one_place_then_its_next_request_goes_to_another() -> None:
    held = [Load(0, 6, of_tenant=6), Load(1, 7, of_tenant=0)]
    for number in range(20):
        assert Router().route(request(f"r{number}", [1, 2, 3]), held).replica == 1


def test_a_replica_when_its_cache_is_gone_then_nothing_is_sought_there() -> None:
    router = Router()
    home = router.route(request("a", text(1, 4)), idle(2)).replica
    router.forget(home)
    assert router.route(request("b", text(1, 4)), idle(2)).how == HOW_LOAD


def test_one_replica_when_it_is_all_there_is_then_nothing_is_remembered() -> None:
    router = Router()
    assert router.route(request("a", text(1, 4)), idle(1)).how == HOW_ONLY
    assert router.route(request("b", text(1, 4)), idle(2)).how == HOW_LOAD


def test_a_request_without_prefix_cache_when_routed_then_only_load_counts() -> None:
    router = Router()
    home = router.route(request("a", text(1, 4)), idle(2)).replica
    loads = [Load(home, 1), Load(1 - home, 0)]
    assert router.route(request("b", text(1, 4), use_prefix_cache=False), loads).replica == 1 - home
    assert router.route(request("c", text(1, 4)), loads).replica == home


def test_a_long_prompt_when_routed_then_its_first_chunks_stand_for_it() -> None:
    router = Router()
    router.route(request("a", text(1, MAX_CHUNKS + 9)), idle(2))
    assert router.route(request("b", text(1, MAX_CHUNKS + 9)), idle(2)).num_cached == MAX_CHUNKS * CHUNK


def test_more_chunks_than_are_kept_when_routed_then_the_least_recently_used_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert KEPT > 1000
    monkeypatch.setattr("novainfer.client.router.MAX_KEPT", 6)
    router, loads = Router(), [Load(0, 0), Load(1, 10_000)]
    for number in (1, 2):
        router.route(request(f"a{number}", text(number, 3)), loads)
    router.route(request("again", text(1, 3)), loads)
    router.route(request("third", text(3, 2)), loads)
    assert router.route(request("b", text(2, 3)), loads).num_cached == CHUNK  # a prompt's end is forgotten first
    assert router.route(request("c", text(1, 3)), loads).num_cached > 0
