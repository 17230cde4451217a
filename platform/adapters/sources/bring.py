"""Brings an adapter's two files from where a request says into a draft.

Not the check of what they hold, nor where they are kept: that is the same for every source, uploads included. Bounded
in time, bytes and redirects; how many go on at once is the caller's affair. Invariant: nothing of a URL but its host is
in an error.
"""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from penstock.adapters.config import AdaptersConfig, SourcesConfig
from penstock.adapters.peft import CONFIG_FILE, FILES, MAX_CONFIG_BYTES
from penstock.adapters.sources.archive import unpack
from penstock.adapters.sources.connection import Connections, Resolve, SystemNames
from penstock.adapters.sources.download import Sign, download, in_thread
from penstock.adapters.sources.folder import copy_adapter
from penstock.adapters.sources.reference import (
    Files,
    Reference,
    check_allowed,
    https_files,
    hub_files,
    read_reference,
    s3_files,
)
from penstock.adapters.sources.rules import Rules, with_endpoints
from penstock.adapters.sources.signature import S3Key, sign
from penstock.adapters.store import digest_of, sha256_of
from penstock.base.errors import ConfigError
from penstock.wire.errors import InvalidRequest, SourceFailed

SHA256 = "sha256:"
_ARCHIVE = "archive"


class SourceSecrets(NamedTuple):
    """Secrets by which a gateway asks stores and hubs; None: it asks as anybody may."""

    s3_key: S3Key | None = None
    hub_token: str | None = None

    def __repr__(self) -> str:
        return "SourceSecrets"


NO_SECRETS = SourceSecrets()


def read_secrets(config: SourcesConfig, read: Callable[[str, str], str]) -> SourceSecrets:
    """The secrets that the configuration names. read: gives a variable's value, by its name and the setting's."""
    key: S3Key | None = None
    if config.s3 is not None:
        access, secret, token = (
            None if variable is None else read(variable, f"adapters.sources.s3.{name}")
            for name in ("access_key_env", "secret_key_env", "session_token_env")
            for variable in [getattr(config.s3, name)]
        )
        key = None if access is None or secret is None else S3Key(access, secret, token)
    variable = None if config.hub is None else config.hub.token_env
    return SourceSecrets(key, None if variable is None else read(variable, "adapters.sources.hub.token_env"))


class _Plan(NamedTuple):
    files: Files
    rules: Rules
    sign: Sign | None = None


class Sources:
    """The places that adapters may come from. now: Unix time. resolve: None: by the system. Raises ConfigError for CAs
    that can't be read."""

    def __init__(
        self, config: AdaptersConfig, secrets: SourceSecrets, now: Callable[[], float], resolve: Resolve | None = None
    ) -> None:
        self._config = config
        self._sources = config.sources
        self._secrets = secrets
        self._now = now
        self._connections = Connections(_tls(self._sources), self._sources.stall_s, resolve or SystemNames())
        self._listed = with_endpoints(self._sources.hosts)

    async def bring(self, source: str, digest: str | None, tenant: str, draft: Path) -> None:
        """Write the two files of `source` into the draft, and nothing else. digest: what they must have. Raises
        InvalidRequest, Forbidden, SourceFailed."""
        reference = read_reference(source)
        if digest is not None:
            digest = digest.lower()
        if reference.kind == "folder":
            await in_thread(self._copy, reference.place, tenant, draft)
            found = None
        else:
            found = await self._fetch(self._plan(reference, tenant), draft)
        if digest is not None:
            await in_thread(_check_digest, draft, digest, found)

    def _copy(self, path: str, tenant: str, draft: Path) -> None:
        home = self._config.import_folder
        if home is None:
            raise _refused("This gateway has no import folder (adapters.import_folder).")
        copy_adapter(Path(home) / tenant, path, draft, self._config.max_bytes)

    def _plan(self, reference: Reference, tenant: str) -> _Plan:
        """URLs, rules and credentials of a source. Raises InvalidRequest, also where the operator has not switched that
        kind on, and Forbidden."""
        sources = self._sources
        if reference.kind == "s3":
            s3 = sources.s3
            if s3 is None:
                raise _refused("This gateway takes no adapters from S3 (adapters.sources.s3).")
            if s3.allow:
                check_allowed(reference.place, s3.allow, tenant, "adapters.sources.s3.allow")
            rules = Rules(with_endpoints((), s3.url), is_public_allowed=False, max_redirects=0)
            key = self._secrets.s3_key
            signing = None if key is None else lambda url: sign(url, key, s3.region, self._now())
            return _Plan(s3_files(s3.url, reference.place), rules, signing)
        if reference.kind == "hub":
            hub = sources.hub
            if hub is None:
                raise _refused("This gateway takes no adapters from a hub (adapters.sources.hub).")
            if hub.allow:
                check_allowed(reference.place, hub.allow, tenant, "adapters.sources.hub.allow")
            rules = Rules(with_endpoints(sources.hosts, hub.endpoint), True, sources.max_redirects)
            token = self._secrets.hub_token
            bearer = None if token is None else lambda _: {"authorization": f"Bearer {token}"}
            return _Plan(hub_files(hub.endpoint, reference.place, reference.revision), rules, bearer)
        if sources.https == "none":
            raise _refused("This gateway takes no adapters from URLs (adapters.sources.https).")
        rules = Rules(self._listed, sources.https == "public", sources.max_redirects)
        return _Plan(https_files(reference.place), rules)

    async def _fetch(self, plan: _Plan, draft: Path) -> str | None:
        """Download and unpack; returns the SHA-256 of an archive, in hex digits."""
        timeout_s = self._sources.timeout_s
        get = partial(download, self._connections, rules=plan.rules, sign=plan.sign)
        num_left = self._config.max_bytes
        try:
            async with asyncio.timeout(timeout_s):
                if plan.files.is_archive:
                    archive = draft / _ARCHIVE
                    fetched = await get(plan.files.urls[0], file=archive, max_bytes=num_left)
                    await in_thread(unpack, archive, draft, num_left)
                    await in_thread(archive.unlink)
                    return fetched.sha256
                for url, name in zip(plan.files.urls, FILES, strict=True):
                    bound = min(num_left, MAX_CONFIG_BYTES) if name == CONFIG_FILE else num_left
                    num_left -= (await get(url, file=draft / name, max_bytes=bound)).num_bytes
        except TimeoutError:
            raise SourceFailed(f"The source did not deliver within {timeout_s:g} seconds.") from None
        return None


def _check_digest(draft: Path, wanted: str, archive_sha256: str | None) -> None:
    """Raises InvalidRequest where the files, or the archive that they came in, are not what was wanted."""
    if wanted.startswith(SHA256):
        what = FILES[1] if archive_sha256 is None else "the archive"
        found = SHA256 + (sha256_of(draft / FILES[1]) if archive_sha256 is None else archive_sha256)
    else:
        what, found = "the adapter", digest_of(draft)
    if found != wanted:
        raise InvalidRequest(f"The digest of {what} is {found}, not {wanted}.", param="digest")


def _tls(sources: SourcesConfig) -> ssl.SSLContext:
    context = httpx.create_ssl_context(trust_env=False)
    if sources.ca_file is not None:
        try:
            context.load_verify_locations(sources.ca_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"adapters.sources.ca_file, {sources.ca_file}, can't be used: {error}") from error
    return context


def _refused(sentence: str) -> InvalidRequest:
    return InvalidRequest(sentence, param="source")
