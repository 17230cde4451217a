"""Settings of the gateway and of the pools it routes to."""

from typing import Literal

import msgspec

from penstock.wire.errors import ConfigError


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the one gateway of a node."""
    max_ongoing_requests: int = 2048
    """Generations one gateway has in hand, from the head of the request to the end of its answer, waiting ones included; one more is refused with
    Retry-After."""
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    """Longest wait for the rest of a request's body."""
    max_queue: int = 1024
    """Requests waiting for a replica in one gateway; one more is refused with Retry-After."""
    queue_timeout_s: float = 30.0
    """Longest wait for a replica before a request is refused with Retry-After."""
    request_timeout_s: float = 600.0
    """Deadline of a request that names none."""
    default_max_tokens: int = 1024
    """Output bound of a request that names none, as far as the context allows."""
    max_buffered_deltas: int = 1024
    """Deltas held for a client that reads slowly; one more aborts its sequence."""
    key_cache_s: float = 1.0
    """Age at which a known API key is looked up again; while Redis is away, known keys go on."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"gateway.port must lie in 1..65535, not {self.port}")
        for name in ("max_ongoing_requests", "max_body_bytes", "max_queue", "default_max_tokens", "max_buffered_deltas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"gateway.{name} must be at least 1, not {getattr(self, name)}")


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a gateway knows of a pool before it has met a replica."""

    name: str
    served_names: tuple[str, ...]
    """Model names of the API that this pool answers to."""
    tier: Literal["edge", "cloud"]
    model: str
    """Checkpoint: path, hub id, or `demo`; tokenizer and chat template are read from it."""
    app_name: str
    """Serve application of its replicas."""
    exact: bool = False
    """Its answers do not depend on what runs beside them."""
    max_model_len: int
