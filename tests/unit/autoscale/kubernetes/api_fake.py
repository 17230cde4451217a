"""An API server of one collection, by the rules that matter here, as a transport of httpx: versions, conflicts, watches
that end or expire."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.autoscale.kubernetes.api import Account, Api

Item = dict[str, Any]


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """Objects by name; every write is an event. `script`: what the next calls get instead of an answer: a status, or an
    exception."""

    objects: dict[str, Item] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """Events before it are forgotten: a watch from there is answered by 410."""
    events: list[tuple[int, Item]] = field(default_factory=list)
    script: deque[int | Exception] = field(default_factory=deque)
    seen: list[str] = field(default_factory=list)
    """Method and path with query, in order."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """All watches end."""

    def put(self, name: str, spec: Item, kind: str | None = None) -> Item:
        self.version += 1
        what = kind or ("MODIFIED" if name in self.objects else "ADDED")
        item = {"metadata": {"name": name, "resourceVersion": str(self.version)}, "spec": spec}
        self.objects[name] = item
        self.events.append((self.version, {"type": what, "object": item}))
        return item

    def remove(self, name: str) -> None:
        self.version += 1
        item = self.objects.pop(name) | {"metadata": {"name": name, "resourceVersion": str(self.version)}}
        self.events.append((self.version, {"type": "DELETED", "object": item}))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(f"{request.method} {request.url.raw_path.decode()}")
        if self.script:
            step = self.script.popleft()
            if isinstance(step, Exception):
                raise step
            if step != 200:
                return httpx.Response(step, json={"kind": "Status", "reason": "Scripted", "message": "as told"})
        if request.url.params.get("watch"):
            return self._watch(int(request.url.params["resourceVersion"]))
        name = request.url.path.rpartition("/")[2]
        if request.method == "GET" and "." not in name and name.endswith("s"):
            return httpx.Response(
                200, json={"metadata": {"resourceVersion": str(self.version)}, "items": list(self.objects.values())}
            )
        if request.method == "GET":
            return (
                httpx.Response(200, json=self.objects[name])
                if name in self.objects
                else httpx.Response(404, json={"reason": "NotFound"})
            )
        return self._write(request.method, name, json.loads(request.content))

    def _write(self, method: str, name: str, body: Any) -> httpx.Response:
        if method == "POST":
            if body["metadata"]["name"] in self.objects:
                return httpx.Response(409, json={"reason": "AlreadyExists"})
            return httpx.Response(201, json=self.put(body["metadata"]["name"], body["spec"]))
        if method == "PATCH":
            changed = patched(self.objects[name], body)
            return (
                httpx.Response(422, json={"reason": "Invalid"})
                if changed is None
                else httpx.Response(200, json=self.put(name, changed["spec"]))
            )
        if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
            return httpx.Response(409, json={"reason": "Conflict"})
        return httpx.Response(200, json=self.put(name, body["spec"]))

    def _watch(self, version: int) -> httpx.Response:
        if version < self.oldest:
            return httpx.Response(410, json={"reason": "Expired"})
        return httpx.Response(200, stream=_Stream(self, version))


def patched(item: Item, operations: list[Item]) -> Item | None:
    """A JSON patch of `test` and `add`, the latter to mappings only. None: a test failed."""
    found: Item = deepcopy(item)
    for operation in operations:
        *way, last = operation["path"].removeprefix("/").split("/")
        place: Any = found
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place.get(step, {})
        if operation["op"] == "add":
            place[last] = operation["value"]
        elif place.get(last) != operation["value"]:
            return None
    return found


class _Stream(httpx.AsyncByteStream):
    def __init__(self, server: FakeServer, version: int) -> None:
        self._server = server
        self._version = version

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._server.closed.is_set():
            for version, event in list(self._server.events):
                if version > self._version:
                    self._version = version
                    yield json.dumps(event).encode() + b"\n"
            await asyncio.sleep(0)
        self._server.closed.clear()


def api_of(server: httpx.AsyncBaseTransport, folder: Path) -> Api:
    (folder / "token").write_text("a-token\n", encoding="ascii")
    return Api(Account("https://api.test", folder), transport=server)
