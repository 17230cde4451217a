"""The few calls to the Kubernetes API that the autoscaler makes, over httpx, with the rights of its pod's service
account.

Not a general client: `kubernetes` costs a second and 80 MB to import, blocks, and watches in threads; needed are get,
create, update, patch, list and watch of four kinds. No hidden retries: every caller has a loop of its own. All calls
are counted.
"""

import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from penstock.base.errors import ConfigError, PenstockError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token and certificate authority."""
CALL_S = 5.0
"""Longest wait of a call for anything."""
WATCH_S = 60
"""The server ends a watch after that, and a new one is begun."""
WATCH_MARGIN_S = 10.0
"""A watch that was not ended so long after its time is dead."""
JSON_PATCH = "application/json-patch+json"

Document = dict[str, Any]


class ApiAway(PenstockError):
    """No answer, or one that says nothing of the request: it may have been done or not. Later may help."""


class ApiRefused(PenstockError):
    """The server's answer: not like this."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class Conflict(ApiRefused):
    """The object has changed since it was read, or exists already."""


class Unfit(ApiRefused):
    """A patch: the object is not as one of its tests says, or would not be valid behind it."""


class Missing(ApiRefused):
    """No such object."""


class Expired(ApiRefused):
    """The version to watch from is forgotten: list again."""


class Account(NamedTuple):
    """Where the API server is, and as whom to ask."""

    server: str
    folder: Path
    """Of `token`, which Kubernetes replaces now and then, and `ca.crt`."""


def account_of(environment: Mapping[str, str], folder: Path = ACCOUNT) -> Account:
    """As Kubernetes tells a pod. Raises ConfigError elsewhere."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "KUBERNETES_SERVICE_HOST is not set: penstock autoscale runs in a pod, by the rights of its service account"
        )
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder / name} is missing: the pod has no service account token (automountServiceAccountToken)"
            )
    return Account(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)


class Api:
    """Use as a context. Paths begin with /api or /apis."""

    def __init__(
        self,
        account: Account,
        transport: httpx.AsyncBaseTransport | None = None,
        count: Callable[[str, str, str], None] | None = None,
    ) -> None:
        """count: called with verb, kind and status of every call, `away` where there was no answer. transport: for
        tests."""
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self._account = account
        self._count = count
        verify = ssl.create_default_context(cafile=str(account.folder / "ca.crt")) if transport is None else True
        self._http = httpx.AsyncClient(
            base_url=account.server, verify=verify, transport=transport, timeout=CALL_S, trust_env=False
        )

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Document:
        return await self._call("get", "GET", path)

    async def find(self, path: str, **query: str) -> Document:
        return await self._call("list", "GET", path, query=query)

    async def create(self, path: str, document: Document) -> Document:
        """path: of the collection. Raises Conflict where it exists."""
        return await self._call("create", "POST", path, document)

    async def update(self, path: str, document: Document) -> Document:
        """Raises Conflict where its resourceVersion is not the latest."""
        return await self._call("update", "PUT", path, document)

    async def patch(self, path: str, operations: list[Document]) -> Document:
        """A JSON patch (RFC 6902). Raises Unfit."""
        return await self._call("patch", "PATCH", path, operations, content_type=JSON_PATCH)

    @asynccontextmanager
    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[AsyncIterator[Document]]:
        """Events after `version`, until the server ends the watch or the connection breaks (ApiAway)."""
        query = {
            **query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = httpx.Timeout(CALL_S, read=WATCH_S + WATCH_MARGIN_S)
        try:
            async with self._http.stream(
                "GET", path, params=query, headers=self._headers(), timeout=timeout
            ) as response:
                self._note("watch", path, str(response.status_code))
                if response.is_error:
                    await response.aread()
                    raise _refusal(response)
                yield _events(response)
        except httpx.HTTPError as error:
            raise ApiAway(f"{path}: {type(error).__name__}") from error

    async def _call(
        self,
        verb: str,
        method: str,
        path: str,
        body: Document | list[Document] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Document:
        content = None if body is None else json.dumps(body).encode()
        headers = self._headers() | ({} if body is None else {"content-type": content_type})
        try:
            response = await self._http.request(method, path, params=query, content=content, headers=headers)
        except httpx.HTTPError as error:
            self._note(verb, path, "away")
            raise ApiAway(f"{method} {path}: {type(error).__name__}") from error
        self._note(verb, path, str(response.status_code))
        if response.is_error:
            raise _refusal(response)
        found: Document = response.json()
        return found

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {(self._account.folder / 'token').read_text(encoding='ascii').strip()}"}

    def _note(self, verb: str, path: str, status: str) -> None:
        kind = kind_of(path)
        self.calls[verb, kind, status] += 1
        if self._count is not None:
            self._count(verb, kind, status)


def kind_of(path: str) -> str:
    """`/apis/GROUP/VERSION/namespaces/NAME/KIND/...`: the plural that RBAC knows."""
    parts = path.strip("/").split("/")
    return (
        parts[parts.index("namespaces") + 2]
        if "namespaces" in parts and len(parts) > parts.index("namespaces") + 2
        else parts[-1]
    )


def refusal(status: int, reason: str, message: str) -> PenstockError:
    """What a failure is, by HTTP status (and, in a watch, by the event's code)."""
    if status == 409:
        return Conflict(status, reason, message)
    if status == 404:
        return Missing(status, reason, message)
    if status == 410:
        return Expired(status, reason, message)
    if status == 422:
        return Unfit(status, reason, message)
    if status == 429 or status >= 500:
        return ApiAway(f"{status} {reason}: {message}")
    return ApiRefused(status, reason, message)


def _refusal(response: httpx.Response) -> PenstockError:
    try:
        said = response.json()
    except ValueError:
        said = {}
    return refusal(response.status_code, str(said.get("reason", response.reason_phrase)), str(said.get("message", "")))


async def _events(response: httpx.Response) -> AsyncIterator[Document]:
    async for line in response.aiter_lines():
        if line:
            try:
                event: Document = msgspec.json.decode(line)
            except msgspec.DecodeError as error:  # the connection was cut in the middle of one
                raise ApiAway(f"a watch broke: {error}") from error
            yield event
