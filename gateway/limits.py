"""What this gateway lets in: places and queued tokens for all, and each API key's own limits.

Everything is reserved before anything costly is done for a request, and given back in one place, `Permit.release`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gateway.quotas import NO_QUOTA, Quota, TokenBucket, as_duration
from novainfer.errors import InvalidRequestError, OverloadedError

QUOTA_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
GUARD_SECONDS = 1.0  # after a refusal
_SMOOTHING = 0.1  # weight of the newest duration in the running mean
_MAX_RETRY_AFTER = 30.0  # seconds, of an estimate from the mean duration
_LEAST = 128  # with less than one part in so many left the queue is full: what is not even parsed need not fit exactly
_KEPT_FOR_SMALL = 8  # with several keys, one part in so many is for tenants that hold less than that


@dataclass(slots=True)
class Cost:
    """What an HTTP request asks for: prompts, choices of all of them, and tokens as far as they are known yet."""

    prompts: int = 1
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """This gateway's part of what the engine can queue and run; `retry_after`: seconds until what waits has started."""

    sequences: int
    queued_tokens: int
    retry_after: float


class Permit:
    """The right to hold what a `Cost` says. Release it in the end."""

    def __init__(self, limits: Limits | None, account: Account, cost: Cost) -> None:
        self._limits = limits
        self._waiting = cost.prompts  # prompts without a first token
        self.account = account
        self.cost = cost
        self.tokens = cost.prompt_tokens + cost.output_tokens  # reserved
        self.used_tokens = 0  # prompt and output, known at the end
        self.started = limits.clock() if limits is not None else 0.0

    @classmethod
    def none(cls) -> Permit:
        """The right to hold nothing."""
        return cls(None, Account(NO_QUOTA, time.monotonic), Cost(prompts=0))

    def correct(self, prompt_tokens: int) -> None:
        """The prompts are tokenised: they have so many tokens. Never refuses."""
        if self._limits is not None:
            self._limits._requeue(self, prompt_tokens + self.cost.output_tokens)

    def begin(self) -> None:
        """One of the prompts has got its first token; with the last one the request waits no more."""
        if self._limits is not None:
            self._waiting -= 1
            if self._waiting == 0:
                self._limits._leave_queue(self)

    def narrow(self) -> None:
        """All is computed, and only the answer is left to be sent: hold one place for it, and no tokens that wait."""
        if self._limits is not None:
            self._limits._narrow(self)
            self._waiting = 0

    def use(self, num_tokens: int) -> None:
        """Prompt and output had so many tokens in the end."""
        if self._limits is not None:
            self.used_tokens = num_tokens

    @property
    def is_queued(self) -> bool:
        """Some prompt has no token yet."""
        return self._waiting > 0

    def release(self) -> None:
        """Give everything back. Idempotent."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits._give_back(self)


class Account:
    """What one tenant holds."""

    def __init__(self, quota: Quota, clock: Callable[[], float]) -> None:
        self.quota = quota
        self.is_free = quota == NO_QUOTA  # no limits of its own
        self.live = 0  # prompts
        self.queued = 0  # of those: of requests that wait for a first token
        self.sequences = 0
        self.queued_tokens = 0
        self.bucket = TokenBucket(quota.tokens_per_minute, clock) if quota.tokens_per_minute else None


NO_PERMIT = Permit.none()  # of all that hold nothing: what it is told changes nothing


class Limits:
    """Live requests of one gateway. `draining`: nothing new is let in.

    num_changes: as long as it is the same, and time changes nothing (`is_timeless`), `check` says the same.
    """

    def __init__(
        self,
        *,
        max_live: int,
        max_per_tenant: int = 0,
        quotas: Mapping[str, Quota] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_per_tenant: live requests of tenants whose quota does not say another number (0 = no limit)."""
        self.draining = False
        self.clock = clock
        self.num_live = 0
        self.num_sequences = 0
        self.queued_tokens = 0
        self.num_changes = 0
        self._guarded_until = 0.0
        self._max_live = max_live
        self._quotas = {name: quota.with_default(max_per_tenant) for name, quota in (quotas or {}).items()}
        self._default = NO_QUOTA.with_default(max_per_tenant)
        self._accounts: dict[str, Account] = {}
        self._mean_seconds = 1.0
        self._is_shared = len(self._quotas) > 1

    def reserve(self, tenant: str, cost: Cost | None = None, room: Room | None = None) -> Permit:
        """Room for a request of `tenant`. Raises what `check` raises."""
        cost = cost or Cost()
        account = self.check(tenant, cost, room)
        tokens = cost.prompt_tokens + cost.output_tokens
        if account.bucket is not None:
            account.bucket.take(tokens)
        self.num_changes += 1
        self.num_live += cost.prompts
        self.num_sequences += cost.sequences
        self.queued_tokens += tokens
        account.live += cost.prompts
        account.queued += cost.prompts
        account.sequences += cost.sequences
        account.queued_tokens += tokens
        return Permit(self, account, cost)

    def check(self, tenant: str, cost: Cost, room: Room | None) -> Account:
        """Whether there is room now; nothing is taken.

        Raises `OverloadedError` with 503 when the server is full or drains, with 429 when the tenant has its share;
        `InvalidRequestError` when so much can never be held.
        """
        account = self._account(tenant)
        if self.draining:
            raise OverloadedError("The server is shutting down.", retry_after=5.0)
        max_requests = account.quota.max_requests
        if cost.prompts > self._max_live or (max_requests and cost.prompts > max_requests):
            raise InvalidRequestError(f"{cost.prompts} prompts in one request are too many.", param="prompt")
        if not account.is_free:
            self._check_quota(account, cost, room)
        if self.num_live + cost.prompts > self._max_live:
            raise OverloadedError("The server is full.", retry_after=self._until_next(self.num_live))
        if room is not None:
            self._check_room(account, cost, room)
        return account

    def most_at_once(self, tenant: str, most: int) -> int:
        """How many of `most` prompts the tenant's own limits let it have at the same time."""
        quota = self._account(tenant).quota
        return min(limit for limit in (most, quota.max_requests, quota.max_queued) if limit)

    def guard(self) -> None:
        """A generation was refused: more are to be expected."""
        self._guarded_until = self.clock() + GUARD_SECONDS

    @property
    def is_guarded(self) -> bool:
        """One was refused a moment ago: it pays to look for room before any other work."""
        return self.clock() < self._guarded_until

    def is_timeless(self, tenant: str) -> bool:
        """The tenant has no limits of its own."""
        return self._account(tenant).is_free

    @property
    def live_by_tenant(self) -> dict[str, int]:
        """Live requests of every tenant that has had one."""
        return {tenant: account.live for tenant, account in self._accounts.items()}

    def headers(self, tenant: str) -> dict[str, str]:
        """`x-ratelimit-*` as OpenAI has them, of the limits that the tenant has."""
        account = self._account(tenant)
        found: dict[str, str] = {}
        if account.is_free:
            return found
        requests, tokens = QUOTA_HEADERS[:3], QUOTA_HEADERS[3:]
        if account.quota.max_requests:
            left = max(account.quota.max_requests - account.live, 0)
            wait = self._until_next(account.live) if account.live else 0.0
            found |= zip(requests, (str(account.quota.max_requests), str(left), as_duration(wait)), strict=True)
        if account.bucket is not None:
            left = max(int(account.bucket.level), 0)
            wait = account.bucket.seconds_until_full
            found |= zip(tokens, (str(account.quota.tokens_per_minute), str(left), as_duration(wait)), strict=True)
        return found

    def _account(self, tenant: str) -> Account:
        """Accounts are as many as keys, and stay: a bucket must remember."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(self._quotas.get(tenant, self._default), self.clock)
        return account

    def _check_quota(self, account: Account, cost: Cost, room: Room | None) -> None:
        quota = account.quota
        if quota.max_requests and account.live + cost.prompts > quota.max_requests:
            raise OverloadedError(
                f"This API key may have {quota.max_requests} requests at once.",
                retry_after=self._until_next(account.live),
                status=429,
            )
        if quota.max_queued and account.queued + cost.prompts > quota.max_queued:
            raise OverloadedError(
                f"This API key may have {quota.max_queued} requests waiting.",
                retry_after=room.retry_after if room is not None else self._until_next(account.queued),
                status=429,
            )
        if account.bucket is not None:
            wait = account.bucket.seconds_until(cost.prompt_tokens + cost.output_tokens)
            if wait > 0:
                text = f"This API key may use {quota.tokens_per_minute} tokens per minute."
                raise OverloadedError(text, retry_after=wait, status=429)

    def _check_room(self, account: Account, cost: Cost, room: Room) -> None:
        if cost.sequences > room.sequences:
            raise InvalidRequestError(f"{cost.sequences} answers are more than this server can queue.", param="n")
        most = room.sequences
        if self._is_shared:
            most = self._open_part(most, account.sequences + cost.sequences)
        if self.num_sequences + cost.sequences > most:
            raise OverloadedError("The queue is full. Please retry later.", retry_after=room.retry_after)
        tokens = cost.prompt_tokens + cost.output_tokens
        most = room.queued_tokens
        if self._is_shared:
            most = self._open_part(most, account.queued_tokens + tokens)
        # One that is larger than the whole bound must have its chance: it may wait if nothing else does.
        if self.queued_tokens and self.queued_tokens + max(tokens, room.queued_tokens // _LEAST) > most:
            raise OverloadedError("Too many tokens wait. Please retry later.", retry_after=room.retry_after)

    def _open_part(self, limit: int, would_hold: int) -> int:
        """What of a limit is open to a tenant that would then hold so much: the rest is for those who hold little."""
        kept = limit // _KEPT_FOR_SMALL
        return limit - kept if would_hold > kept else limit

    def _requeue(self, permit: Permit, tokens: int) -> None:
        change = tokens - permit.tokens
        self.num_changes += 1
        permit.tokens = tokens
        if permit.is_queued:
            self.queued_tokens += change
            permit.account.queued_tokens += change
        if permit.account.bucket is not None:
            permit.account.bucket.take(change)

    def _leave_queue(self, permit: Permit) -> None:
        self.num_changes += 1
        self.queued_tokens -= permit.tokens
        permit.account.queued_tokens -= permit.tokens
        permit.account.queued -= permit.cost.prompts

    def _narrow(self, permit: Permit) -> None:
        account, cost = permit.account, permit.cost
        if permit.is_queued:
            self._leave_queue(permit)
        permit.cost = replace(cost, prompts=min(cost.prompts, 1), sequences=min(cost.sequences, 1))
        self._free(account, cost.prompts - permit.cost.prompts, cost.sequences - permit.cost.sequences)

    def _free(self, account: Account, prompts: int, sequences: int) -> None:
        self.num_changes += 1
        self.num_live -= prompts
        self.num_sequences -= sequences
        account.live -= prompts
        account.sequences -= sequences

    def _give_back(self, permit: Permit) -> None:
        account, cost = permit.account, permit.cost
        if permit.is_queued:
            self._leave_queue(permit)
        if account.bucket is not None:
            account.bucket.take(permit.used_tokens - permit.tokens)
        self._free(account, cost.prompts, cost.sequences)
        duration = self.clock() - permit.started
        self._mean_seconds += _SMOOTHING * (duration - self._mean_seconds)

    def _until_next(self, live: int) -> float:
        """Seconds until one of `live` requests probably ends."""
        return min(max(self._mean_seconds / max(live, 1), 0.1), _MAX_RETRY_AFTER)
