"""One GET over one connection, to an address that has been checked.

A name is resolved once for each connection, every address that it has is checked, and the connection goes to one of
those very addresses: a name that means something else a moment later changes nothing. TLS and the Host header go by the
name. Not redirects and not bodies (`download`). Nothing of the environment counts: no proxy, no .netrc, no CA.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import httpx

from penstock.adapters.sources.addresses import Address, is_public
from penstock.adapters.sources.rules import PORTS, show
from penstock.wire.errors import InvalidRequest, SourceFailed

CONNECT_S = 10.0
LOOKUP_THREADS = 4
MAX_ADDRESSES = 3
"""Addresses of a host that are tried."""
HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "penstock"}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that gives the addresses of a host and port. Raises OSError."""


class SystemNames:
    """The system's resolver, in threads of its own: a name whose servers do not answer holds one for long, and must not
    take those that everything else runs in."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="names")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Addresses, each once. Raises OSError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Connections:
    """Makes connections. context: for TLS. stall_s: longest wait for the next bytes, seconds. is_allowed: whether an
    address may be connected to, of a host that is not listed."""

    def __init__(
        self,
        context: ssl.SSLContext,
        stall_s: float,
        resolve: Resolve,
        is_allowed: Callable[[Address], bool] = is_public,
    ) -> None:
        self._context = context
        self._timeout = httpx.Timeout(stall_s, connect=min(CONNECT_S, stall_s)).as_dict()
        self._resolve = resolve
        self._is_allowed = is_allowed

    @asynccontextmanager
    async def get(
        self, url: httpx.URL, headers: Mapping[str, str], *, is_listed: bool
    ) -> AsyncIterator[httpx.Response]:
        """The response to a GET, its body not read yet and not decoded. is_listed: addresses are not checked. Raises
        InvalidRequest for a host with an address that is not public, SourceFailed for one that can't be asked."""
        addresses = await self._find(url, is_listed)
        try:
            async with httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, retries=0) as transport:
                response = await self._ask(transport, url, headers, addresses)
                try:
                    yield response
                finally:
                    await response.aclose()
        except httpx.TransportError as error:
            raise SourceFailed(f"{show(url)} can't be read from: {_reason(error)}.") from error

    async def _find(self, url: httpx.URL, is_listed: bool) -> list[str]:
        """Addresses to connect to. A host that does not resolve is refused by the same sentence as one that must not be
        reached, so that nobody learns the names of a network from the difference."""
        port = url.port or PORTS[url.scheme]
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await self._resolve(url.raw_host.decode("ascii"), port)
        except (OSError, UnicodeError, TimeoutError):
            found = []
        if is_listed and not found:
            raise SourceFailed(f"{show(url)} has no address.")
        if not is_listed and not (found and all(self._is_allowed(ipaddress.ip_address(address)) for address in found)):
            raise InvalidRequest(
                f"{show(url)} has no address on the public internet, or others beside it, and is not among the hosts"
                " that the operator has listed (adapters.sources.hosts).",
                param="source",
            )
        return list(found[:MAX_ADDRESSES])

    async def _ask(
        self, transport: httpx.AsyncHTTPTransport, url: httpx.URL, headers: Mapping[str, str], addresses: list[str]
    ) -> httpx.Response:
        name = url.raw_host.decode("ascii")
        for number, address in enumerate(addresses, 1):
            request = httpx.Request(
                "GET",
                url.copy_with(host=address),
                headers={"host": url.netloc.decode("ascii"), **HEADERS, **headers},
                extensions={"timeout": self._timeout, "sni_hostname": name},
            )
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise AssertionError("a host that is asked has an address")


def _reason(error: httpx.TransportError) -> str:
    """A failure in words. Of an exception's own text only what TLS says of a certificate is shown."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate does not hold ({cause.verify_message})"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection came about"
    if isinstance(error, httpx.TimeoutException):
        return "it stopped sending"
    return "the response broke off, or is no HTTP"
