"""What the HTTP surface works with: the models it serves and the collaborators a composition root hands to it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.base.tracing import Tracing
from penstock.router.completions.admission import Admission
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.models.adapter_models import AdapterDeps
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Dispatcher
from penstock.tenancy.keys import KeyStore


class PoolReplicas(NamedTuple):
    """How many replicas of a pool this gateway is connected to."""

    pool: str
    tier: str
    num_connected: int


def _nothing() -> None:
    """For a gateway whose gauges are always up to date."""


def _never() -> bool:
    """For a gateway without providers."""
    return False


@dataclass(frozen=True)
class GatewayDeps:
    config: GatewayConfig
    models: Mapping[str, ServedModel]
    """By served name."""
    dispatcher: Dispatcher
    keys: KeyStore
    admission: Admission
    metrics: Metrics
    replicas: Callable[[], Sequence[PoolReplicas]]
    providers: Mapping[str, ProviderConfig] = field(default_factory=dict)
    has_provider: Callable[[], bool] = _never
    """Whether a provider may be asked now."""
    refresh: Callable[[], None] = _nothing
    """Called before /metrics is rendered, for gauges that are computed only when somebody looks."""
    adapters: AdapterDeps | None = None
    """None: this gateway serves no adapters."""
    tracing: Tracing | None = None
    """None: no request is traced."""
    now: Callable[[], float] = time.time
    """Unix time, seconds."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic, seconds."""
    random: Random = field(default_factory=Random)
    """For request ids and seeds, which must differ but are no secret: the system's own randomness costs a call to the
    kernel each."""

    def can_serve(self) -> bool:
        """Whether there is somebody now who could answer a request."""
        return any(pool.num_connected for pool in self.replicas()) or self.has_provider()
