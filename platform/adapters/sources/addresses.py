"""Addresses of the public internet, told from all others.

A download that a tenant names must not reach what only this machine or its network can reach. Pure: nothing is looked
up. Source: IANA's special-purpose registries (RFC 6890), which `ipaddress` knows in part, and differently from version
to version.
"""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address

_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
"""Prefix under which a network without IPv4 reaches all of IPv4 (RFC 6052)."""
_REFUSED = tuple(
    ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocols' own, metadata of one cloud among them
        "192.88.99.0/24",  # relays of 6to4
        "168.63.129.16/32",  # a cloud's own services, from every machine in it
        "2001::/23",  # protocols' own, Teredo among them, which embeds IPv4
        "2002::/16",  # 6to4, which embeds IPv4
        "3fff::/20",  # documentation
    )
)


def is_public(address: Address) -> bool:
    """Whether it is an address of one host on the public internet. One that embeds an IPv4 address (mapped, NAT64) is
    what that is; 6to4 and Teredo are never."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST or address.scope_id is not None:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address.version == network.version and address in network for network in _REFUSED)
    )
