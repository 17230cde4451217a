import pytest

from penstock.router.transport.addresses import Addresses

PROXIES = ["10.0.0.0/8", "fd00::/8"]


@pytest.mark.parametrize(
    ("trusted", "peer", "client"),
    [
        (None, "1.2.3.4", None),
        ([], "1.2.3.4", "1.2.3.4"),
        ([], "::ffff:1.2.3.4", "1.2.3.4"),
        ([], "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        (PROXIES, "1.2.3.4", "1.2.3.4"),
        (PROXIES, "10.1.2.3", None),
        (PROXIES, "fd00::1", None),
        ([], None, None),
        ([], "a socket", None),
    ],
)
def test_the_client_of_a_connection_is_its_peer_unless_that_is_a_proxy_or_nobody_knows(
    trusted: list[str] | None, peer: str | None, client: str | None
) -> None:
    assert Addresses(trusted).of_connection(peer) == client


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded_for", "client"),
    [
        (None, "10.0.0.1", [b"1.2.3.4"], None),
        ([], "10.0.0.1", [b"1.2.3.4"], "10.0.0.1"),
        (PROXIES, "5.6.7.8", [b"1.2.3.4"], "5.6.7.8"),
        (PROXIES, "10.0.0.1", [b"1.2.3.4"], "1.2.3.4"),
        (PROXIES, "10.0.0.1", [b"9.9.9.9, 1.2.3.4"], "1.2.3.4"),
        (PROXIES, "10.0.0.1", [b"9.9.9.9, 1.2.3.4, 10.0.0.2"], "1.2.3.4"),
        (PROXIES, "10.0.0.1", [b"9.9.9.9", b"1.2.3.4", b"10.0.0.2"], "1.2.3.4"),
        (PROXIES, "10.0.0.1", [], None),
        (PROXIES, "10.0.0.1", [b"9.9.9.9, unknown, 10.0.0.2"], None),
        (PROXIES, "10.0.0.1", [b"9.9.9.9," + b"10.0.0.2," * 5000 + b"10.0.0.2"], None),
    ],
)
def test_the_client_of_a_request_is_what_listed_proxies_tell_from_the_right(
    trusted: list[str] | None, peer: str, forwarded_for: list[bytes], client: str | None
) -> None:
    assert Addresses(trusted).of_request(peer, forwarded_for) == client
