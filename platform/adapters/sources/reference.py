"""`source` of POST /v1/adapters, read: which kind of place it names, and the URLs of the files there.

Pure: nothing is asked for. Forms: `folder:NAME`, `https://...` (an archive, or a folder with the two files), `s3://
BUCKET/PREFIX` (the same), `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION`.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple
from urllib.parse import quote

import httpx

from penstock.adapters.peft import FILES
from penstock.adapters.sources.archive import is_archive
from penstock.adapters.sources.rules import read_url
from penstock.wire.errors import Forbidden, InvalidRequest

Kind = Literal["folder", "https", "s3", "hub"]

MAIN = "main"
"""Revision of a hub's repository where none is named."""
TENANT = "{tenant}"
"""Part of an allowed place that stands for the id of the tenant that asks."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class Reference(NamedTuple):
    """A place that a caller has named."""

    kind: Kind
    place: str
    """The folder; the URL; bucket/key; owner/name."""
    revision: str = ""
    """Revision of a hub's repository; empty for all others."""


class Files(NamedTuple):
    """The URLs of a place: of its archive, or of the two files in the order of FILES."""

    urls: tuple[httpx.URL, ...]
    is_archive: bool


def read_reference(source: str) -> Reference:
    """Raises InvalidRequest."""
    kind, separator, rest = source.partition(":")
    kind = kind.lower()
    if separator and kind == "folder" and rest:
        return Reference("folder", rest)
    if separator and kind in ("https", "http"):
        return Reference("https", source)
    if separator and kind == "s3":
        return _read_s3(rest)
    if separator and kind == "hub":
        return _read_hub(rest)
    raise _refused("'source' begins with https://, s3://, hub: or folder:, with a name behind it.")


def https_files(text: str) -> Files:
    """Raises InvalidRequest."""
    url = read_url(text)
    return _files(url, url.path)


def s3_files(endpoint: str, place: str) -> Files:
    """URLs of bucket/key in path style, encoded as they are signed. endpoint: of the store, without a path."""
    url = httpx.URL(f"{endpoint.rstrip('/')}/{quote(place, safe='/-_.~')}")
    return _files(url, place)


def hub_files(endpoint: str, repository: str, revision: str) -> Files:
    """URLs by which the Hugging Face hub, and what imitates it, gives single files of a repository."""
    base = f"{endpoint.rstrip('/')}/{repository}/resolve/{quote(revision, safe='')}"
    return Files(tuple(httpx.URL(f"{base}/{name}") for name in FILES), is_archive=False)


def check_allowed(place: str, allowed: Iterable[str], tenant: str, setting: str) -> None:
    """Raises Forbidden for a place that is none of the allowed ones, and lies under none of them."""
    entries = [entry.strip("/").replace(TENANT, tenant) for entry in allowed]
    if not any(place == entry or place.startswith(f"{entry}/") for entry in entries):
        raise Forbidden(f"{place[:200]!r} is none of the places that you may take adapters from ({setting}).")


def _read_s3(rest: str) -> Reference:
    bucket, _, key = rest.removeprefix("//").partition("/")
    key = key.strip("/")
    if not rest.startswith("//") or _BUCKET.fullmatch(bucket) is None or not key:
        raise _refused("An S3 source is s3://BUCKET/PREFIX, where the adapter's files lie under the prefix.")
    if any(part in ("", ".", "..") for part in key.split("/")) or not key.isprintable():
        raise _refused("The prefix of an S3 source has parts that are empty or dots, or holds control characters.")
    return Reference("s3", f"{bucket}/{key}")


def _read_hub(rest: str) -> Reference:
    repository, _, revision = rest.partition("@")
    revision = revision or MAIN
    if _REPOSITORY.fullmatch(repository) is None or ".." in repository:
        raise _refused("A hub's source is hub:OWNER/NAME or hub:OWNER/NAME@REVISION.")
    # anybody may open a pull request at a repository, and what it has would count as the repository's
    if _REVISION.fullmatch(revision) is None or ".." in revision or revision.startswith("refs/"):
        raise _refused(f"{revision[:100]!r} is no revision of a repository.")
    return Reference("hub", repository, revision)


def _files(url: httpx.URL, name: str) -> Files:
    if is_archive(name):
        return Files((url,), is_archive=True)
    return Files(tuple(_below(url, file) for file in FILES), is_archive=False)


def _below(url: httpx.URL, name: str) -> httpx.URL:
    """A file in the folder that a URL names; its query, which may hold a signature for the folder, goes along."""
    path, mark, query = url.raw_path.partition(b"?")
    return url.copy_with(raw_path=path.rstrip(b"/") + b"/" + name.encode("ascii") + mark + query)


def _refused(sentence: str) -> InvalidRequest:
    return InvalidRequest(sentence, param="source")
