"""A connection goes to the address that was checked, by the name that was asked for."""

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import httpx
import pytest

from penstock.adapters.sources.addresses import is_public
from penstock.adapters.sources.connection import Connections
from penstock.base.tls import TlsFiles
from penstock.wire.errors import InvalidRequest, SourceFailed
from tests.certificates import Authority
from tests.unit.adapters.sources.servers import Names, files_at, serve

PAGES = files_at({"/a": b"right"})
EVIL = files_at({"/a": b"wrong"})


def connections(names: Names, tls: TlsFiles | None = None, taken_for_public: tuple[str, ...] = ()) -> Connections:
    """taken_for_public: addresses of this machine that stand for the internet."""
    context = httpx.create_ssl_context(trust_env=False)
    if tls is not None:
        assert tls.ca is not None
        context.load_verify_locations(tls.ca)

    def is_allowed(address: IPv4Address | IPv6Address) -> bool:
        return str(address) in taken_for_public or is_public(address)

    return Connections(context, 5.0, names, is_allowed)


async def read(found: Connections, url: str, *, is_listed: bool = False) -> bytes:
    async with found.get(httpx.URL(url), {}, is_listed=is_listed) as response:
        return b"".join([part async for part in response.aiter_raw()])


async def test_a_name_that_changes_its_meaning_is_asked_once_and_checked_again_for_the_next_connection() -> None:
    names = Names(a_test=[["127.0.0.2"], ["127.0.0.1"]])
    async with serve(PAGES, host="127.0.0.2") as right, serve(EVIL, port=right.port) as evil:
        found = connections(names, taken_for_public=("127.0.0.2",))
        url = f"http://a.test:{right.port}/a"

        first = await read(found, url)
        with pytest.raises(InvalidRequest, match="has no address on the public internet"):
            await read(found, url)

        assert first == b"right"
        assert names.looked_up == ["a.test", "a.test"], "each connection looks up once"
        assert (len(right.asked), len(evil.asked)) == (1, 0)


@pytest.mark.parametrize(
    "addresses",
    [
        "127.0.0.1",
        "8.8.8.8 127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "",
    ],
)
async def test_a_host_with_any_address_that_is_not_public_is_refused_by_one_sentence(addresses: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^'a\.test' has no address on the public internet, or others beside it"):
        await read(connections(Names(a_test=addresses)), "https://a.test/a")


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f000001", "127.1", "0", "[::1]", "[::ffff:7f00:1]"])
async def test_numbers_in_every_notation_are_what_they_mean(host: str) -> None:
    with pytest.raises(InvalidRequest, match="has no address on the public internet"):
        await read(connections(Names()), f"https://{host}/a")


async def test_a_name_that_does_not_resolve_is_refused_by_the_sentence_of_a_private_one() -> None:
    with pytest.raises(InvalidRequest, match="has no address on the public internet"):
        await read(connections(Names()), "https://unknown.test/a")
    with pytest.raises(SourceFailed, match="has no address"):
        await read(connections(Names()), "https://unknown.test/a", is_listed=True)


async def test_a_certificate_must_hold_for_the_name_not_for_the_address(tmp_path: Path) -> None:
    good = Authority().issue(tmp_path / "good", "a.test")
    by_address = Authority().issue(tmp_path / "address", "127.0.0.1")
    async with serve(PAGES, good) as server, serve(PAGES, by_address) as other:
        names = Names(a_test="127.0.0.1")

        answer = await read(connections(names, good), f"https://a.test:{server.port}/a", is_listed=True)

        assert answer == b"right"
        assert server.asked[0].headers["host"] == f"a.test:{server.port}"
        for found, port in ((connections(names), server.port), (connections(names, by_address), other.port)):
            with pytest.raises(SourceFailed, match="its certificate does not hold"):
                await read(found, f"https://a.test:{port}/a", is_listed=True)


async def test_the_next_address_is_tried_where_the_first_one_takes_no_connection() -> None:
    async with serve(PAGES, host="127.0.0.2") as server:
        found = connections(Names(a_test="127.0.0.3 127.0.0.2"))

        assert await read(found, f"http://a.test:{server.port}/a", is_listed=True) == b"right"


async def test_nothing_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proxy would resolve names itself, and see what is fetched."""
    (tmp_path / ".netrc").write_text("machine a.test login user password word\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    async with serve(PAGES) as server, serve(EVIL) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")

        answer = await read(connections(Names(a_test="127.0.0.1")), f"http://a.test:{server.port}/a", is_listed=True)

        assert (answer, proxy.asked) == (b"right", [])
        assert sorted(server.asked[0].headers) == ["accept", "accept-encoding", "host", "user-agent"]
