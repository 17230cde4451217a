"""A tenant's share of what replicas compute: its weight, and the class of its requests. Pure.

Not a limit: a tenant with a small share gets everything that nobody else waits for. Who gets what is counted by
`penstock.router.dispatch.shares.counters`.
"""

from typing import NamedTuple

SERVICE_CLASSES = ("interactive", "standard", "batch")
"""Classes of requests, the first one the last to be refused where the queue is full. One of two tenants that have had
the same, the one of the earlier class goes first."""
DEFAULT_CLASS = "standard"
BATCH_FACTOR = 0.1
"""Part of its weight with which a tenant of the class `batch` counts: so it waits long where others wait, and is never
starved."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


class Share(NamedTuple):
    """What a tenant may have of the replicas where others want them too."""

    weight: float = 1.0
    """Tokens of this tenant for one of a tenant with weight 1, while both wait."""
    service_class: str = DEFAULT_CLASS
    is_apart: bool = False
    """Whether these requests count apart from the tenant's others: lines of batches do, or a tenant that has a batch
    would wait with what it asks itself."""

    def for_lines(self) -> "Share":
        """Share of the lines of the tenant's batches: of the class `batch`, whatever the tenant's is."""
        return Share(self.weight, "batch", is_apart=True)

    def account(self, tenant: str) -> str:
        """Name under which a tenant's requests with this share are counted; no other tenant has it as its id."""
        return f"{tenant}/batch" if self.is_apart else tenant

    @property
    def rate(self) -> float:
        """The weight with which its tokens count."""
        return self.weight * BATCH_FACTOR if self.service_class == "batch" else self.weight

    @property
    def rank(self) -> int:
        """Place of the class in SERVICE_CLASSES; a class that a later version may know counts as the default one."""
        known = self.service_class if self.service_class in SERVICE_CLASSES else DEFAULT_CLASS
        return SERVICE_CLASSES.index(known)


DEFAULT_SHARE = Share()


class Service(NamedTuple):
    """What one gateway has given to a tenant."""

    cost: float
    """Cost of the tokens divided by the tenant's weight, summed since it began to count."""
    is_waiting: bool
    """Whether requests of the tenant wait there."""
