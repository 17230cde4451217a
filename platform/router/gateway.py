"""What the HTTP surface works with: the models it serves and the collaborators a composition root hands to it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.base.metrics import Metrics
from penstock.router.config import GatewayConfig
from penstock.router.generation import Dispatcher
from penstock.tenancy.keys import KeyStore
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model name of the API."""

    name: str
    pools: tuple[str, ...]
    tokenizer: Tokenizer
    max_model_len: Callable[[], int]
    """Tokens, prompt and answer: the longest context among the pools, as far as it is known now."""
    digest: str
    """Of the checkpoint; its beginning is the API's system_fingerprint."""
    exact: bool = False
    """All its pools compute in exact mode."""
    created: int = 0
    """Unix time, seconds."""
    owned_by: str = "penstock"

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.digest[:12]}"


class PoolReplicas(NamedTuple):
    """How many replicas of a pool this gateway is connected to."""

    pool: str
    tier: str
    num_connected: int


def _nothing() -> None:
    """For a gateway whose gauges are always up to date."""


@dataclass(frozen=True)
class GatewayDeps:
    config: GatewayConfig
    models: Mapping[str, ServedModel]
    """By served name."""
    dispatcher: Dispatcher
    keys: KeyStore
    metrics: Metrics
    replicas: Callable[[], Sequence[PoolReplicas]]
    refresh: Callable[[], None] = _nothing
    """Called before /metrics is rendered, for gauges that are computed only when somebody looks."""
    now: Callable[[], float] = time.time
    """Unix time, seconds."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic, seconds."""
    random: Random = field(default_factory=Random)
    """For request ids and seeds, which must differ but are no secret: the system's own randomness costs a call to the kernel each."""
