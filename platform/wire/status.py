"""The response of GET /v1/status: what runs, as far as a tenant may know it."""

import msgspec


class ModelStatus(msgspec.Struct, kw_only=True):
    """A model that the tenant may use."""

    id: str
    """Name as /v1/models lists it."""
    max_model_len: int
    """Longest context, prompt and answer, in tokens."""
    replicas: int
    """Replicas that serve it and that the gateway is connected to."""


class Status(msgspec.Struct, kw_only=True):
    """What the gateway that answers serves to the tenant."""

    version: str
    """Penstock's version."""
    is_ready: bool = msgspec.field(name="ready")
    """Whether a replica is connected, or a provider takes requests."""
    models: list[ModelStatus]
