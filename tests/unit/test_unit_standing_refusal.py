"""A refusal that stands until something changes: never longer, and each one gets an answer of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.auth import KeyRing
from gateway.body import ByteBudget
from gateway.context import RequestInfo
from gateway.door import Door
from gateway.engine_metrics import ClientView
from gateway.limits import Cost, Limits, Permit, Room
from gateway.metrics import GatewayMetrics
from gateway.plain_request import PlainRequest
from gateway.quotas import Quota
from novainfer.config import KeyDigest
from novainfer.errors import OverloadedError

pytestmark = pytest.mark.unit

COMMON: list[tuple[bytes, bytes]] = [(b"date", b"today")]


class Service:
    """As much of a `GatewayService` as a door sees, with places for three."""

    def __init__(self, **quotas: Quota) -> None:
        self.config = SimpleNamespace(server=SimpleNamespace(cors_origins=()))
        self.client: Any = SimpleNamespace(limits=object(), stats=object())
        self.limits = Limits(max_live=3, quotas=quotas)
        self.metrics = GatewayMetrics("m", ClientView)
        self.max_body_bytes = 1000
        self.body_budget = ByteBudget(10_000, is_shared=False)
        self.room = Room(sequences=100, queued_tokens=100, retry_after=1.0)
        self.num_looks = 0

    def check_room(self, info: RequestInfo) -> None:
        self.num_looks += 1
        cost = Cost(sequences=1, prompt_tokens=info.body_bytes // 2)
        try:
            self.limits.check(info.tenant, cost, self.room)
        except OverloadedError:
            info.headers |= self.limits.headers(info.tenant)
            raise

    def fill(self) -> list[Permit]:
        return [self.limits.reserve("", Cost(sequences=1)) for _ in range(3)]

    def num_refused(self) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        found = [line for line in lines if line.startswith("novainfer_admission_rejections_total")]
        return sum(float(line.split()[-1]) for line in found)


def request(num_bytes: int = 20, path: str = "/v1/completions", name: bytes = b"", tenant: str = "") -> PlainRequest:
    headers = [(b"content-type", b"application/json"), *([(b"x-request-id", name)] if name else [])]
    headers += [(b"x-api-key", key_of(tenant))] if tenant else []
    return PlainRequest(path, headers, 100, num_bytes)


def key_of(tenant: str) -> bytes:
    return b"key of " + tenant.encode()


def door_of(service: Service, *tenants: str) -> Door:
    keys = [KeyDigest(tenant, hashlib.sha256(key_of(tenant)).hexdigest()) for tenant in tenants]
    return Door(service, KeyRing(keys))  # type: ignore[arg-type]


def test_given_many_without_room_when_refused_then_one_look_is_enough_and_each_has_its_own_answer() -> None:
    service = Service()
    door = door_of(service)
    service.fill()
    answers = [door.refusal(request(name=b"n%d" % i), COMMON) for i in range(20)]
    assert service.num_looks == 1
    assert service.num_refused() == 20
    for i, answer in enumerate(answers):
        assert answer is not None
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
        assert b"x-request-id: n%d" % i in lines
        assert b"date: today" in lines
        assert b"content-length: %d" % len(body) in lines
        assert b"\0" not in answer
    waits = {line for answer in answers if answer for line in answer.split(b"\r\n") if b"retry-after-ms" in line}
    assert len(waits) > 10  # they shall not come back together


def test_given_a_standing_refusal_when_a_place_is_free_then_the_next_is_let_in() -> None:
    service = Service()
    door = door_of(service)
    permits = service.fill()
    assert door.refusal(request(), COMMON) is not None
    permits[0].release()
    assert door.refusal(request(), COMMON) is None
    service.limits.reserve("", Cost(sequences=1))
    assert door.refusal(request(), COMMON) is not None


def test_given_a_standing_refusal_when_what_it_says_is_another_thing_then_it_is_made_anew() -> None:
    service = Service()
    door = door_of(service)
    service.fill()

    def is_made_anew(one: PlainRequest, headers_of_all: Any = COMMON) -> bool:
        before = service.num_looks
        assert door.refusal(one, headers_of_all) is not None
        return service.num_looks > before

    assert is_made_anew(request())
    assert not is_made_anew(request(30))
    assert is_made_anew(request(10))
    assert is_made_anew(request(path="/v1/chat/completions"))
    assert not is_made_anew(request(path="/v1/chat/completions"))
    assert is_made_anew(request(path="/v1/chat/completions"), [(b"date", b"tomorrow")])
    assert is_made_anew(request())
    service.client.stats = object()
    assert is_made_anew(request())
    service.limits.draining = True
    answer = door.refusal(request(), COMMON)
    assert answer is not None
    assert b"shutting down" in answer


def test_given_a_tenant_with_a_quota_when_time_passes_then_its_refusals_do_not_stand() -> None:
    service = Service(**{"": Quota(tokens_per_minute=60)})
    door = door_of(service)
    service.limits.reserve("", Cost(sequences=1, prompt_tokens=60))
    for _ in range(3):
        answer = door.refusal(request(), COMMON)
        assert answer is not None
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"x-ratelimit-remaining-tokens: " in answer
    assert service.num_looks == 3


def test_given_a_standing_refusal_of_one_tenant_when_another_has_room_then_it_is_let_in() -> None:
    service = Service(heavy=Quota(), light=Quota())
    door = door_of(service, "heavy", "light")
    service.limits.reserve("heavy", Cost(sequences=1, prompt_tokens=80))
    for _ in range(2):
        answer = door.refusal(request(tenant="heavy"), COMMON)
        assert answer is not None
        assert b"Too many tokens wait." in answer
    assert service.num_looks == 1
    assert door.refusal(request(tenant="light"), COMMON) is None
    assert door.refusal(request(tenant="heavy"), COMMON) is not None


def begin_all(service: Service) -> list[Permit]:
    permits = service.fill()
    for permit in permits:
        permit.begin()
    return permits


def queue_many_tokens(service: Service) -> list[Permit]:
    return [service.limits.reserve("", Cost(sequences=1, prompt_tokens=95))]


@pytest.mark.parametrize(
    ("fill", "free"),
    [
        (Service.fill, Permit.release),
        (begin_all, Permit.release),
        (queue_many_tokens, Permit.release),
        (queue_many_tokens, Permit.begin),
        (queue_many_tokens, lambda permit: permit.correct(10)),
    ],
    ids=["a waiting one ends", "a running one ends", "its tokens are gone", "it has begun", "it was tokenised"],
)
def test_given_a_standing_refusal_when_there_is_room_then_the_next_is_let_in(
    fill: Callable[[Service], list[Permit]], free: Callable[[Permit], None]
) -> None:
    service = Service()
    door = door_of(service)
    permits = fill(service)
    assert all(door.refusal(request(), COMMON) for _ in range(2))
    assert service.num_looks == 1
    free(permits[0])
    assert door.refusal(request(), COMMON) is None


def test_given_a_standing_refusal_when_others_take_what_is_left_then_the_next_hears_what_is_wanting_now() -> None:
    service = Service()
    door = door_of(service)
    queue_many_tokens(service)
    answer = door.refusal(request(), COMMON)
    assert answer is not None
    assert b"Too many tokens wait." in answer
    for _ in range(2):
        service.limits.reserve("", Cost(sequences=1))
    answer = door.refusal(request(), COMMON)
    assert answer is not None
    assert b"The server is full." in answer


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_given_no_room_for_a_body_when_there_is_none_for_its_request_either_then_the_application_answers(
    *, stands: bool, is_shared: bool
) -> None:
    service = Service()
    budget = service.body_budget = ByteBudget(200, is_shared=is_shared)
    door = door_of(service)
    service.fill()
    assert not stands or door.refusal(request(), COMMON) is not None
    before = service.num_refused()
    budget.take("", 81 if is_shared else 181)
    assert door.refusal(request(20), COMMON) is None
    assert service.num_refused() == before
    assert door.refusal(request(19), COMMON) is not None
    budget.give_back("", 1)
    assert door.refusal(request(20), COMMON) is not None
