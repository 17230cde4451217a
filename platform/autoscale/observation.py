"""A pool as the autoscaler sees it at one moment: what gateways and replicas report, and what Serve runs. Data only."""

from typing import NamedTuple

import msgspec

from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import PoolFlow


class ReplicaSeen(NamedTuple):
    """A replica that gateways route to, as the gateway with the latest report sees it."""

    replica_id: str
    load: Load
    block_size: int
    cached_blocks: int
    hit_tokens: int
    """Prompt tokens that all gateways expected in its cache, since their links to it began."""


class ServeState(NamedTuple):
    """A pool in Serve's own words."""

    target: int
    running: tuple[str, ...]
    """Replica ids; those that are on their way out are not among them."""
    num_starting: int = 0
    num_stopping: int = 0


class Observation(NamedTuple):
    placed: ServeState
    flows: dict[str, PoolFlow]
    """By gateway, since its start."""
    num_queued: int
    """Requests that wait in gateways."""
    oldest_wait_s: float
    replicas: tuple[ReplicaSeen, ...]
    age_s: float
    """Of the oldest report in this; infinite where there is none."""

    @property
    def num_present(self) -> int:
        """Sequences on replicas."""
        return sum(seen.load.num_running + seen.load.num_waiting for seen in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Requests in queues, and sequences that wait on replicas."""
        return self.num_queued + sum(seen.load.num_waiting for seen in self.replicas)

    @property
    def num_serving(self) -> int:
        return sum(not seen.load.is_draining for seen in self.replicas)


def mean_costs(replicas: tuple[ReplicaSeen, ...]) -> StepCosts | None:
    """Of a pool's replicas, coefficient by coefficient; None where none has measured any."""
    costs = [seen.load.costs for seen in replicas if seen.load.costs != StepCosts()]
    if not costs:
        return None
    columns = zip(*map(msgspec.structs.astuple, costs), strict=True)
    return StepCosts(*(sum(column) / len(costs) for column in columns))
