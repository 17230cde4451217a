"""Settings of the token stream between gateways and replicas: the section `stream` of the configuration."""

import msgspec


class StreamConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    accept_previous_hello: bool = False
    """Whether gateways and replicas of the version before and of this one may serve together, for an upgrade in place.
    Replicas need PENSTOCK_CLUSTER_SECRET as long as it is on, and a stream's opening that somebody has recorded opens
    it again."""
