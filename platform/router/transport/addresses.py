"""Addresses of clients: whose a request is, where that can be known.

Not what is limited by it (`connections`, `failures`). The address of a connection is its client's own only where the
operator has said what stands in front of the gateways: `gateway.trusted_proxies`. Invariant: None, which means that
nobody knows, is never counted as one client.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

IPV6_CLIENT_BITS = 64
"""Leading bits of an IPv6 address that count as one client: what a provider gives to one subscriber (RFC 6177)."""
MAX_HOPS = 32
"""Most addresses of X-Forwarded-For that are read, from the right."""

Address = IPv4Address | IPv6Address


class Addresses:
    """The clients' addresses, as the listed proxies tell them.

    trusted: networks of proxies whose X-Forwarded-For holds; empty: clients connect directly. None: what stands in
    front is not known, so no address is a client's.
    """

    def __init__(self, trusted: Sequence[str] | None) -> None:
        self._trusted = None if trusted is None else [ip_network(text) for text in trusted]

    def of_connection(self, peer: str | None) -> str | None:
        """The client of a whole connection. Returns None if it is not known, or if the peer is a listed proxy, whose
        connection may carry many. peer: the other end's IP address."""
        if self._trusted is None or peer is None:
            return None
        address = _parse(peer)
        return None if address is None or self._is_trusted(address) else _client(address)

    def of_request(self, peer: str | None, forwarded_for: Sequence[bytes]) -> str | None:
        """The client of one request. forwarded_for: values of its X-Forwarded-For headers, read from the right up to
        the first address that is no listed proxy's; whatever stands left of that, the client has written itself.

        Returns None if it is not known.
        """
        if self._trusted is None or peer is None:
            return None
        told = b",".join(forwarded_for).decode("latin-1").rsplit(",", MAX_HOPS)[-MAX_HOPS:]
        for text in [peer, *reversed(told)]:
            address = _parse(text.strip())
            if address is None or not self._is_trusted(address):
                return None if address is None else _client(address)
        return None

    def _is_trusted(self, address: Address) -> bool:
        assert self._trusted is not None
        return any(address in network for network in self._trusted)


def _parse(text: str) -> Address | None:
    """The address, an IPv4 one that was mapped into IPv6 as itself. Returns None if it is none."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _client(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address), IPV6_CLIENT_BITS), strict=False))
