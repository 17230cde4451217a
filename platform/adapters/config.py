"""Settings of the adapters: where their files lie, what a tenant may bring, and from where."""

import re
from typing import Literal

import httpx
import msgspec

from penstock.base.errors import ConfigError

HOST_PATTERN = r"^([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$"
"""Form of a listed host: a name or an address, in brackets one of IPv6, with a port where it is not 443 or 80."""
MAX_DOWNLOAD_S = 600.0
"""Longest time that a download may be given; what nobody owns is swept later than that, seconds."""
MAX_REDIRECTS = 20


class S3Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store with S3's API that adapters may come from."""

    endpoint: str | None = None
    """Address of the store, as https://minio.example.com:9000; buckets are parts of the path. None: AWS' of the
    region."""
    region: str = "us-east-1"
    access_key_env: str | None = None
    """Environment variable with the id of the access key. None: requests are anonymous."""
    secret_key_env: str | None = None
    """Environment variable with the secret of that key."""
    session_token_env: str | None = None
    """Environment variable with the session token of temporary credentials; None: they are not temporary."""
    allow: tuple[str, ...] = ()
    """Buckets, or bucket/prefix, that tenants may take adapters from; `{tenant}` in one stands for the tenant's id.
    Empty: any, which is refused beside credentials."""

    @property
    def url(self) -> str:
        """Address of the store."""
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"

    def __post_init__(self) -> None:
        where = "adapters.sources.s3"
        if self.endpoint is not None:
            _check_endpoint(f"{where}.endpoint", self.endpoint)
        if re.fullmatch(r"[a-z0-9-]{1,64}", self.region) is None:
            raise ConfigError(f"{where}.region must be letters, digits and dashes, not {self.region!r}")
        if (self.access_key_env is None) != (self.secret_key_env is None):
            raise ConfigError(f"{where}.access_key_env and secret_key_env belong together; set both or neither")
        if self.session_token_env is not None and self.access_key_env is None:
            raise ConfigError(f"{where}.session_token_env is of no use without access_key_env and secret_key_env")
        _check_allow(f"{where}.allow", self.allow, self.access_key_env)


class HubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A hub, the Hugging Face hub or one like it, that adapters may come from."""

    endpoint: str = "https://huggingface.co"
    token_env: str | None = None
    """Environment variable with a token of the hub. None: requests are anonymous."""
    allow: tuple[str, ...] = ()
    """Owners, or owner/name, that tenants may take adapters from. Empty: any, which is refused beside a token."""

    def __post_init__(self) -> None:
        _check_endpoint("adapters.sources.hub.endpoint", self.endpoint)
        _check_allow("adapters.sources.hub.allow", self.allow, self.token_env)


class SourcesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Places outside that a tenant may name in POST /v1/adapters. By default there are none."""

    https: Literal["none", "listed", "public"] = "none"
    """URLs that are allowed. none; listed: of `hosts`; public: of any host on the public internet too, by https at port
    443."""
    hosts: tuple[str, ...] = ()
    """Hosts that may have private addresses, other ports (host:port) and http; a hub may redirect to them too."""
    s3: S3Source | None = None
    """Store behind s3://; None: there is none."""
    hub: HubSource | None = None
    """Hub behind hub:; None: there is none."""
    ca_file: str | None = None
    """PEM file of further CAs, for servers with certificates of one's own."""
    max_redirects: int = 5
    """Redirects that one file may take; a store has none."""
    timeout_s: float = MAX_DOWNLOAD_S
    """Longest time of a download, seconds."""
    stall_s: float = 30.0
    """Longest wait for its next bytes, seconds."""

    @property
    def has_any(self) -> bool:
        """Whether anything outside is asked."""
        return self.https != "none" or self.s3 is not None or self.hub is not None

    def __post_init__(self) -> None:
        where = "adapters.sources"
        for host in self.hosts:
            if re.fullmatch(HOST_PATTERN, host) is None or not _is_url(f"https://{host}/"):
                raise ConfigError(f"{where}.hosts must hold names or addresses, with :PORT if need be, not {host!r}")
        if self.https == "listed" and not self.hosts:
            raise ConfigError(f"{where}.https is listed, but {where}.hosts names no host")
        if not 0 <= self.max_redirects <= MAX_REDIRECTS:
            raise ConfigError(f"{where}.max_redirects must be 0 to {MAX_REDIRECTS}, not {self.max_redirects}")
        for name in ("timeout_s", "stall_s"):
            if not 0 < getattr(self, name) <= MAX_DOWNLOAD_S:
                raise ConfigError(
                    f"{where}.{name} must be above 0 and at most {MAX_DOWNLOAD_S:g}, not {getattr(self, name)}"
                )


class AdaptersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section `adapters` of the configuration."""

    folder: str | None = None
    """Folder of the adapters' files, by digest; gateways and replicas share it (in a cluster: a volume that all mount).
    None: `adapters` in the state folder."""
    import_folder: str | None = None
    """Where `folder:NAME` of POST /v1/adapters is looked up: in a folder of the tenant's id in here. None: nowhere."""
    sources: SourcesConfig = msgspec.field(default_factory=SourcesConfig)
    """Places outside that adapters may come from."""
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


def _check_endpoint(name: str, value: str) -> None:
    url = httpx.URL(value) if _is_url(value) else None
    if url is None or url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigError(f"{name} must be http:// or https:// and a host, not {value!r}")


def _is_url(text: str) -> bool:
    try:
        return (httpx.URL(text).port or 1) < 2**16
    except (httpx.InvalidURL, ValueError):
        return False


def _check_allow(name: str, allow: tuple[str, ...], secret: str | None) -> None:
    for entry in allow:
        if not entry.strip("/") or "//" in entry:
            raise ConfigError(f"{name} holds {entry!r}, which names no place")
    if secret is not None and not allow:
        raise ConfigError(f"{name} names nothing: any tenant could read whatever the credentials open")
