"""The hosts that a download may go to, by its URL: what can be told before a name is resolved.

Not the addresses behind a name (`connection` checks those at each connection). Invariant: no URL passes with a user in
it, and none that is not https unless its host is listed.
"""

from collections.abc import Iterable
from typing import NamedTuple

import httpx

from penstock.wire.errors import InvalidRequest

PORTS = {"https": 443, "http": 80}


class Host(NamedTuple):
    """A host that may be connected to: its name in lower case, and the port; None: 443, and 80 for http."""

    name: str
    port: int | None = None


def read_host(text: str) -> Host:
    """A host of the configuration: name, name:port, address, [IPv6], [IPv6]:port. Raises ValueError."""
    url = httpx.URL(f"https://{text}/")
    if not url.host or url.userinfo or url.raw_path != b"/" or url.fragment:
        raise ValueError(f"{text!r} is no host")
    return Host(_name(url), None if url.port in PORTS.values() else url.port)


def host_of(url: httpx.URL) -> Host:
    """The host of a URL as a list has it."""
    return Host(_name(url), None if url.port == PORTS.get(url.scheme) else url.port)


def read_url(text: str) -> httpx.URL:
    """A URL that a caller has sent. Raises InvalidRequest, without its text: it may hold a secret."""
    try:
        return httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest("The source is not a valid URL.", param="source") from None


class Rules(NamedTuple):
    """What one download may do."""

    listed: frozenset[Host]
    """Hosts that the operator trusts: their addresses are not checked, and http is allowed."""
    is_public_allowed: bool
    """Whether hosts that are not listed may be asked, by https at port 443, where all their addresses are public."""
    max_redirects: int

    def check(self, url: httpx.URL) -> bool:
        """Whether the URL's host is listed. Raises InvalidRequest for a URL that must not be asked for."""
        if url.scheme not in PORTS or not url.host or b"%" in url.raw_host:
            raise _refused(f"The source is no https address but {url.scheme[:20]!r}.")
        if url.userinfo:
            raise _refused("The source has a user or a password in its address.")
        if host_of(url) in self.listed:
            return True
        shown = show(url)
        if not self.is_public_allowed:
            raise _refused(f"{shown} is not among the hosts that adapters may come from (adapters.sources.hosts).")
        if url.scheme != "https":
            raise _refused(f"{shown} would be asked by http; only https is allowed, but for listed hosts.")
        if url.port not in (None, PORTS["https"]):
            raise _refused(f"{shown} is not at port 443; other ports are only allowed of listed hosts.")
        return False


def with_endpoints(hosts: Iterable[str], *endpoints: str) -> frozenset[Host]:
    """Hosts of the configuration, and those of endpoints in it."""
    return frozenset([*map(read_host, hosts), *(host_of(httpx.URL(endpoint)) for endpoint in endpoints)])


def show(url: httpx.URL) -> str:
    """The host of a URL for a sentence; its path and query may hold secrets."""
    return repr(_name(url)[:100] + ("" if url.port is None else f":{url.port}"))


def _name(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _refused(sentence: str) -> InvalidRequest:
    return InvalidRequest(sentence, param="source")
