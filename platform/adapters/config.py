"""Settings of the adapters: where their files lie, and what a tenant may bring."""

import msgspec

from penstock.base.errors import ConfigError


class AdaptersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `adapters` of the configuration."""

    folder: str | None = None
    """Folder of the adapters' files, by digest; gateways and replicas share it (in a cluster: a volume that all mount).
    None: `adapters` in the state folder."""
    import_folder: str | None = None
    """Where `path` of POST /v1/adapters is looked up: in a folder of the tenant's id in here. None: adapters are only
    uploaded."""
    max_bytes: int = 512 * 2**20
    """Most bytes of one adapter's files."""
    max_per_tenant: int = 64
    """Adapters that a tenant may have at once."""
    load_timeout_s: float = 10.0
    """How long POST /v1/adapters waits for the replicas to load it; it is served in any case, by the first request that
    names it."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_per_tenant"):
            if getattr(self, name) < 1:
                raise ConfigError(f"adapters.{name} must be at least 1, not {getattr(self, name)}")
        if not self.load_timeout_s >= 0:
            raise ConfigError(f"adapters.load_timeout_s must be 0 or more, not {self.load_timeout_s}")
