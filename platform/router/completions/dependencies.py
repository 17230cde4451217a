"""The collaborators of the HTTP surface, built by a composition root: the models that are served, dispatcher, keys,
admission, metrics."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.base.tracing import Tracing
from penstock.router.batches.dependencies import BatchDependencies
from penstock.router.completions.admission import Admission, check_model
from penstock.router.completions.constraints import ConstraintChecker
from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.heartbeats import FIRST_S
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.models.adapter_models import AdapterDependencies
from penstock.router.models.request_targets import RequestTargets
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Dispatcher
from penstock.tenancy.keys import KeyStore
from penstock.tenancy.tenants import Tenant
from penstock.text.seen import SeenTexts
from penstock.wire.errors import ModelNotFound


class PoolReplicas(NamedTuple):
    """How many replicas of a pool this gateway is connected to."""

    pool: str
    tier: str
    num_connected: int
    starts_on_demand: bool = False
    """Whether the pool gets a replica when a request comes."""


def _no_refresh() -> None:
    """The default of `refresh`: all gauges are up to date always."""


def _no_provider() -> bool:
    """The default of `has_provider`: there are no providers."""
    return False


@dataclass(frozen=True)
class GatewayDependencies:
    """Everything a handler of requests may use."""

    config: GatewayConfig
    models: Mapping[str, ServedModel]
    """Models of the API by served name, adapters aside."""
    dispatcher: Dispatcher
    keys: KeyStore
    admission: Admission
    metrics: Metrics
    replicas: Callable[[], Sequence[PoolReplicas]]
    providers: Mapping[str, ProviderConfig] = field(default_factory=dict)
    has_provider: Callable[[], bool] = _no_provider
    """Whether at least one provider takes requests now."""
    refresh: Callable[[], None] = _no_refresh
    """Called before /metrics is rendered: sets the gauges that are computed for a scrape only."""
    threads: FairThreads = field(default_factory=FairThreads)
    """Threads for templates and tokenization."""
    seen: SeenTexts = field(default_factory=SeenTexts)
    """Token ids of texts that tenants sent before."""
    constraints: ConstraintChecker = field(default_factory=ConstraintChecker)
    """Checks what answers are to keep to."""
    adapters: AdapterDependencies | None = None
    """Collaborators for adapters; None: this gateway serves none."""
    batches: BatchDependencies | None = None
    """Where files and batches are kept; None: this gateway keeps none."""
    first_heartbeat_s: float = FIRST_S
    """Wait for a first replica after which its stream gets heartbeats, seconds."""
    targets: RequestTargets = field(default_factory=lambda: RequestTargets({}))
    """Targets that requests are measured and placed by; by default none but the gateway's ttft_target_s, by which they
    are placed."""
    tracing: Tracing | None = None
    """Recorder of traces; None: no request is traced."""
    now: Callable[[], float] = time.time
    """Clock of Unix time, seconds."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock, seconds."""
    random: Random = field(default_factory=Random)
    """Source of request ids and seeds, which must differ but are no secret: the system's own randomness costs a call to
    the kernel each."""

    def can_serve(self) -> bool:
        """Whether a replica is connected or started when a request comes, or a provider takes requests."""
        return any(pool.num_connected or pool.starts_on_demand for pool in self.replicas()) or self.has_provider()

    async def find_model(self, tenant: Tenant, name: str) -> ServedModel:
        """A served model, or one of the tenant's adapters.

        Raises ModelNotFound, Forbidden where the tenant may not use it, or Overloaded when adapters can't be looked up.
        """
        model = self.models.get(name)
        if model is None and self.adapters is not None:
            model = await self.adapters.models.find(tenant.id, name)
        if model is None:
            raise ModelNotFound(
                f"The model '{name[:100]}' does not exist or you do not have access to it.", param="model"
            )
        check_model(tenant, model.label)
        return model
