"""What a source may name, and the URLs behind it."""

import pytest

from penstock.adapters.sources.reference import (
    Reference,
    check_allowed,
    https_files,
    hub_files,
    read_reference,
    s3_files,
)
from penstock.wire.errors import Forbidden, InvalidRequest


@pytest.mark.parametrize(
    ("source", "reference"),
    [
        ("folder:a/b", Reference("folder", "a/b")),
        ("https://h/a?x=1", Reference("https", "https://h/a?x=1")),
        ("HTTPS://h/a", Reference("https", "HTTPS://h/a")),
        ("http://h/a", Reference("https", "http://h/a")),
        ("s3://bucket/a/b/", Reference("s3", "bucket/a/b")),
        ("hub:owner/name", Reference("hub", "owner/name", "main")),
        ("hub:owner/name@team/one", Reference("hub", "owner/name", "team/one")),
    ],
)
def test_a_source_names_a_kind_and_a_place(source: str, reference: Reference) -> None:
    assert read_reference(source) == reference


@pytest.mark.parametrize(
    "source",
    [
        "a/b",
        "folder:",
        "ftp://h/a",
        "file:///etc/passwd",
        "s3:bucket/key",
        "s3://bucket",
        "s3://bucket/",
        "s3://b/k",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "s3://bucket/./b",
        "s3://bucket@host/b",
        "s3://bucket/a\nb",
        "hub:name",
        "hub:owner/name/file",
        "hub:../name",
        "hub:owner/..",
        "hub:owner/na..me",
        "hub:owner/name@../../x",
        "hub:owner/name@a?b",
        "hub:owner/name@refs/pr/1",
        "hub:owner/name?x",
    ],
)
def test_what_names_no_place_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest):
        read_reference(source)


def test_a_folder_by_url_has_its_two_files_and_its_query_with_each() -> None:
    found = https_files("https://h/a%2Fb/c/?token=x%2By")

    assert [str(url) for url in found.urls] == [
        "https://h/a%2Fb/c/adapter_config.json?token=x%2By",
        "https://h/a%2Fb/c/adapter_model.safetensors?token=x%2By",
    ]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "A.TGZ"])
def test_an_archive_is_one_file(name: str) -> None:
    found = https_files(f"https://h/{name}?token=x")

    assert (found.is_archive, [str(url) for url in found.urls]) == (True, [f"https://h/{name}?token=x"])
    assert s3_files("https://s3.test", f"bucket/{name}").is_archive


def test_a_key_of_a_store_is_encoded_as_it_is_signed() -> None:
    found = s3_files("https://s3.test:9000/", "bucket/a b/c+d(e)'é=&~%2F")

    assert found.urls[0].raw_path == b"/bucket/a%20b/c%2Bd%28e%29%27%C3%A9%3D%26~%252F/adapter_config.json"
    assert found.urls[0].netloc == b"s3.test:9000"


def test_a_revision_is_one_part_of_the_path() -> None:
    found = hub_files("https://hub.test/", "owner/name", "refs/pr/1")

    assert found.urls[1].raw_path == b"/owner/name/resolve/refs%2Fpr%2F1/adapter_model.safetensors"


@pytest.mark.parametrize("place", ["bucket/shared", "bucket/shared/a", "bucket/tenants/t1/a"])
def test_an_allowed_place_and_what_lies_under_it_is_allowed(place: str) -> None:
    check_allowed(place, ["bucket/shared/", "bucket/tenants/{tenant}"], "t1", "setting")


@pytest.mark.parametrize("place", ["bucket", "bucket/sharedx", "bucket/tenants/t2/a", "bucket/tenants/t11", "buck"])
def test_any_other_place_is_forbidden(place: str) -> None:
    with pytest.raises(Forbidden, match=r"\(setting\)"):
        check_allowed(place, ["bucket/shared/", "bucket/tenants/{tenant}"], "t1", "setting")
