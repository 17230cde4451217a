"""A pool's state at one moment, on which a decision rests: what gateways and replicas report, and what Serve runs. Data
only."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.perf import model
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import PoolFlow


class ReplicaSnapshot(NamedTuple):
    """A replica that gateways route to, by the gateway with the latest report."""

    replica_id: str
    load: Load
    block_size: int
    cached_blocks: int
    hit_tokens: int
    """Prompt tokens that all gateways expected in its cache, since their links to it began."""
    start: StartTimes | None = None
    """How long its own phases of the start took; None: not known."""


class ServeState(NamedTuple):
    """A pool as Serve has it."""

    target: int
    running: tuple[str, ...]
    """Ids of the replicas that run; those that are draining are not among them."""
    num_starting: int = 0
    num_stopping: int = 0


class Observation(NamedTuple):
    """One pool, from all gateways that report."""

    serve_state: ServeState
    flows: dict[str, PoolFlow]
    """Each gateway's totals since its start."""
    num_queued: int
    """Requests that wait in gateways."""
    oldest_wait_s: float
    replicas: tuple[ReplicaSnapshot, ...]
    age_s: float
    """Seconds since the oldest report that was used; infinite where there is none."""
    queues: Mapping[str, int] = MappingProxyType({})
    """Requests that wait in each gateway."""

    @property
    def num_present(self) -> int:
        """Sequences on replicas."""
        return sum(replica.load.num_running + replica.load.num_waiting for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Requests in queues, and sequences that wait on replicas."""
        return self.num_queued + sum(replica.load.num_waiting for replica in self.replicas)

    @property
    def num_serving(self) -> int:
        return sum(not replica.load.is_draining for replica in self.replicas)


def mean_costs(replicas: tuple[ReplicaSnapshot, ...]) -> StepCosts | None:
    """The mean of the replicas' step costs, coefficient by coefficient; None where none has measured any."""
    costs = [replica.load.costs for replica in replicas if replica.load.costs != StepCosts()]
    return model.mean_costs(costs) if costs else None
