"""Settings of files and batches: where texts lie, and what a tenant may have of them."""

import msgspec

from penstock.base.errors import ConfigError


class BatchesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `batches` of the configuration."""

    folder: str | None = None
    """Folder of the files' texts, which all gateways share (in a cluster: a volume that all mount). None: `batches` in
    the state folder; in a cluster /v1/files and /v1/batches are refused."""
    max_file_bytes: int = 200 * 2**20
    """Most bytes of one file that is brought."""
    max_lines: int = 50_000
    """Most lines of one batch."""
    max_tenant_bytes: int = 2**30
    """Bytes of the files that a tenant may have, results of its batches included. Lines of a batch wait while it has
    more."""
    max_tenant_lines: int = 200_000
    """Lines of a tenant's batches that have not ended; a batch more than that is refused."""
    max_parallel: int = 32
    """Lines that one gateway runs at once, of all batches. No other line's text is in memory, and of these each has at
    most `gateway.max_body_bytes`."""
    keep_days: float = 30.0
    """Age at which a file that names no other, and an ended batch, are gone. At most 30."""

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_lines", "max_tenant_bytes", "max_tenant_lines", "max_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"batches.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.keep_days <= 30:
            raise ConfigError(f"batches.keep_days must be more than 0 and up to 30, not {self.keep_days}")

    @property
    def keep_s(self) -> float:
        return 86400 * self.keep_days
