"""Settings of the token stream between gateways and replicas: the section `stream` of the configuration."""

import msgspec

from penstock.base.errors import ConfigError
from penstock.base.tls import TlsFiles

GATEWAY_NAME = "gateway.penstock"
"""DNS name that a gateway's certificate has, wherever the gateway is."""
REPLICA_NAME = "replica.penstock"
"""DNS name that a replica's certificate has, wherever the replica is."""


class StreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    accept_previous_hello: bool = False
    """Whether gateways and replicas of the version before and of this one may serve together, for an upgrade in place.
    Replicas need PENSTOCK_CLUSTER_SECRET as long as it is on, and a stream's opening that somebody has recorded opens
    it again."""
    tls: TlsFiles | None = None
    """Mutual TLS: certificates of one CA, a gateway's with the name gateway.penstock, a replica's with
    replica.penstock. None: streams are not encrypted."""

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls.ca is None:
            raise ConfigError("stream.tls.ca must be named: both sides check the other's certificate by it")
