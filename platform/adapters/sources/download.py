"""A file by GET: redirects one by one under the rules, its bytes counted and hashed as they come.

Invariants: credentials go to the first URL's origin only, and never again after a redirect has led elsewhere; nothing
of a body is decoded; what is cancelled has no thread left that writes.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import httpx

from penstock.adapters.sources.connection import Connections
from penstock.adapters.sources.rules import Rules, show
from penstock.wire.errors import InvalidRequest, SourceFailed

WRITE_BYTES = 2**20
"""Bytes that are collected before a thread writes them."""
REDIRECTS = (301, 302, 303, 307, 308)

P = ParamSpec("P")
T = TypeVar("T")
Sign = Callable[[httpx.URL], Mapping[str, str]]
"""Function that gives the headers that prove who asks, for a URL."""


class Fetched(NamedTuple):
    """A file that has been written."""

    num_bytes: int
    sha256: str


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a thread; whoever cancels waits until it has ended, so that it writes nothing afterwards."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        work.exception()  # nobody else will ask for it
        raise


async def download(
    connections: Connections, url: httpx.URL, rules: Rules, file: Path, max_bytes: int, sign: Sign | None = None
) -> Fetched:
    """Write what the URL holds to a file that does not exist yet. Raises InvalidRequest for what the caller can change,
    SourceFailed for the rest."""
    first = _origin(url)
    may_sign = True
    for _ in range(rules.max_redirects + 1):
        is_listed = rules.check(url)
        may_sign = may_sign and _origin(url) == first
        headers = sign(url) if sign is not None and may_sign else {}
        async with connections.get(url, headers, is_listed=is_listed) as response:
            if response.status_code not in REDIRECTS:
                _check_status(url, response, file.name)
                return await _write(url, response, file, max_bytes)
            url = _next(url, response)
    raise InvalidRequest(
        f"The source redirects more than {rules.max_redirects} times, the last time to {show(url)}."
        if rules.max_redirects
        else f"The source redirects to {show(url)}, which is not followed; a bucket may be in another region.",
        param="source",
    )


def _next(url: httpx.URL, response: httpx.Response) -> httpx.URL:
    try:
        following = url.join(response.headers.get("location", ""))
    except (httpx.InvalidURL, ValueError):
        raise SourceFailed(f"{show(url)} redirects to what is no address.") from None
    if url.scheme == "https" and following.scheme != "https":
        raise InvalidRequest(f"{show(url)} redirects from https to something else.", param="source")
    return following


def _check_status(url: httpx.URL, response: httpx.Response, name: str) -> None:
    status = response.status_code
    if status in (404, 410):
        raise InvalidRequest(f"{show(url)} has no {name} there (HTTP {status}).", param="source")
    if 400 <= status < 500 and status not in (408, 429):
        raise InvalidRequest(f"{show(url)} does not give {name} away (HTTP {status}).", param="source")
    if status != 200:
        raise SourceFailed(f"{show(url)} answered with HTTP {status}.")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise SourceFailed(f"{show(url)} sends {name} encoded ({encoding[:40]}), which was not asked for.")


async def _write(url: httpx.URL, response: httpx.Response, file: Path, max_bytes: int) -> Fetched:
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(url, file.name, max_bytes)
    state = hashlib.sha256()
    num_bytes = 0

    def keep(parts: list[bytes]) -> None:
        for part in parts:
            state.update(part)
            opened.write(part)

    held: list[bytes] = []
    num_held = 0
    opened = await in_thread(file.open, "xb")
    try:
        async for part in response.aiter_raw():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(url, file.name, max_bytes)
            held.append(part)
            num_held += len(part)
            if num_held >= WRITE_BYTES:
                await in_thread(keep, held)
                held, num_held = [], 0
        await in_thread(keep, held)
    finally:
        opened.close()
    return Fetched(num_bytes, state.hexdigest())


def _too_large(url: httpx.URL, name: str, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"{name} at {show(url)} is larger than {max_bytes} bytes.", param="source")


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
