"""Who is owed service: a virtual token counter per tenant (VTC, arXiv 2401.00588), and each tenant's share. Pure.

A tenant is one API key; without keys everybody is one tenant, and nothing here changes the order of arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Steps for which a tenant without live sequences is still counted: clients that send one request after the other are
# away between two of them, and their share must not be gone when they come back.
PRESENCE_STEPS = 256
# Steps for which such a tenant also finds a free row: others wait for it, so it is only as long as a client needs.
ROW_STEPS = 32


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account.

    served: units of service it got, divided by its weight: one for each token computed, one more for each sampled.
    """

    name: str
    weight: float
    served: float = 0.0
    num_live: int = 0  # sequences that have not ended
    num_waiting: int = 0
    num_rows: int = 0
    last_live_step: int = 0


class FairShares:
    """The accounts of all tenants; their number is that of the API keys."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Weights by tenant; those that are not named have weight 1."""
        self._weights = dict(weights)
        self._tenants: dict[str, Tenant] = {}
        self._present: dict[str, Tenant] = {}
        self._total_weight = 0.0
        self._step = 0
        self._floor = 0.0  # the counter of the tenant that was last served

    @property
    def num_present(self) -> int:
        """Tenants that live, or did a moment ago."""
        return len(self._present)

    def of(self, name: str) -> Tenant:
        """The tenant's account, opened if need be."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
        return tenant

    def enter(self, name: str, count: int) -> None:
        """`count` new sequences of the tenant. If none of it waits, it has no credit left from the time before."""
        tenant = self.of(name)
        if tenant.num_waiting == 0:
            waiting = [other.served for other in self._present.values() if other.num_waiting]
            tenant.served = max(tenant.served, min(waiting, default=self._floor))
        tenant.num_live += count
        if name not in self._present:
            self._present[name] = tenant
            self._total_weight += tenant.weight

    def leave(self, name: str, step: int) -> None:
        """One of its sequences has ended; `step`: the number of the newest plan."""
        tenant = self._tenants[name]
        tenant.num_live -= 1
        tenant.last_live_step = step

    def forget_absent(self, step: int) -> None:
        """Stop counting tenants that have been away for long. Called with each step."""
        self._step = step
        if len(self._present) < 2:
            return
        gone = [
            tenant
            for tenant in self._present.values()
            if tenant.num_live == 0 and step - tenant.last_live_step >= PRESENCE_STEPS
        ]
        for tenant in gone:
            del self._present[tenant.name]
        if gone:
            self._total_weight = sum(tenant.weight for tenant in self._present.values())

    def started(self, tenant: Tenant) -> None:
        """The tenant was the next one, and was served."""
        self._floor = max(self._floor, tenant.served)

    def charge(self, name: str, units: int) -> None:
        """The tenant gets `units` of service."""
        tenant = self._tenants[name]
        tenant.served += units / tenant.weight

    def share(self, tenant: Tenant) -> float:
        """Its part of rows, blocks and tokens, 0 to 1, while all who are present want theirs."""
        return tenant.weight / self._total_weight if len(self._present) > 1 else 1.0

    def rows_due(self, tenant: Tenant, num_rows: int) -> int:
        """Rows that are its share: at least one."""
        return max(1, int(self.share(tenant) * num_rows))

    def rows_kept_free(self, tenant: Tenant, num_rows: int) -> int:
        """Free rows that this tenant must leave to others who are present and have none; at most half of all."""
        if tenant.num_rows < self.rows_due(tenant, num_rows):
            return 0
        without = sum(
            1
            for other in self._present.values()
            if other.num_rows == 0
            and other is not tenant
            and (other.num_live or self._step - other.last_live_step < ROW_STEPS)
        )
        return min(without, num_rows // 2)
