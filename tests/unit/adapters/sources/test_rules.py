"""URLs that may be asked for at all."""

import httpx
import pytest

from penstock.adapters.sources.rules import Host, Rules, read_host, read_url, show, with_endpoints
from penstock.wire.errors import InvalidRequest

PUBLIC = Rules(with_endpoints(["files.example", "store.example:9000", "[fd00::1]:8080", "plain.example:80"]), True, 5)
LISTED = PUBLIC._replace(is_public_allowed=False)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Files.Example", Host("files.example")),
        ("files.example:443", Host("files.example")),
        ("files.example:9000", Host("files.example", 9000)),
        ("10.0.0.1:80", Host("10.0.0.1")),
        ("[FD00::1]:8080", Host("fd00::1", 8080)),
    ],
)
def test_a_host_of_the_configuration_is_a_name_and_a_port(text: str, host: Host) -> None:
    assert read_host(text) == host


@pytest.mark.parametrize(
    "url",
    [
        "https://files.example/a",
        "http://files.example/a",
        "https://FILES.example.:443/a",
        "http://store.example:9000/a",
        "https://[fd00::1]:8080/a",
        "http://plain.example/a",
    ],
)
def test_a_listed_host_may_be_asked_by_http_and_at_its_port(url: str) -> None:
    assert LISTED.check(read_url(url))


def test_another_host_only_where_the_public_internet_is_allowed() -> None:
    assert not PUBLIC.check(read_url("https://other.example/a"))
    with pytest.raises(InvalidRequest, match=r"'other\.example' is not among the hosts"):
        LISTED.check(read_url("https://other.example/a"))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://other.example/a", "would be asked by http"),
        ("https://other.example:8443/a", "is not at port 443"),
        ("https://store.example/a:9000", "PASSES"),
        ("https://files.example:9000/a", "is not at port 443"),
        ("https://user@files.example/a", "has a user or a password"),
        ("https://user:open-sesame@files.example/a", "has a user or a password"),
        ("https://files.example@10.0.0.1/a", "has a user or a password"),
        ("ftp://files.example/a", "is no https address"),
        ("file:///etc/passwd", "is no https address"),
        ("https:///a", "is no https address"),
        ("/a", "is no https address"),
    ],
)
def test_what_must_not_be_asked_for_is_refused_with_a_sentence(url: str, sentence: str) -> None:
    if sentence == "PASSES":
        assert not PUBLIC.check(read_url(url)), "another port of a listed host is not listed"
        return
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        PUBLIC.check(read_url(url))
    assert "sesame" not in refused.value.message


@pytest.mark.parametrize(
    "url", ["https://[::1/a", "https://a b/?token=secret", "https://h:99999/a?token=secret", "x" * 70_000]
)
def test_what_is_no_url_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PUBLIC.check(read_url(url))
    assert "secret" not in refused.value.message
    assert len(refused.value.message) < 200


def test_a_sentence_shows_the_host_alone() -> None:
    assert show(httpx.URL("https://files.example:8443/secret?token=secret#secret")) == "'files.example:8443'"
