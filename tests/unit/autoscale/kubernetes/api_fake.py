"""An API server of one collection, by the rules that matter here: versions, conflicts, watches that end or expire. It
answers over HTTP, to the client that the autoscaler has."""

import asyncio
import json
import shutil
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import certifi
from aiohttp import web
from kubernetes.aio.client import ApiClient

from penstock.autoscale.kubernetes.client import CALL_S, Account, CountCall, open_client

Item = dict[str, Any]


@dataclass
class FakeServer:
    """Objects by name; every write is an event. `script`: what the next calls get instead: a status, a page, or
    None for a connection that breaks."""

    objects: dict[str, Item] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """The oldest version that is remembered: a watch from before it is answered by 410."""
    events: list[tuple[int, Item]] = field(default_factory=list)
    script: deque[int | str | None] = field(default_factory=deque)
    seen: list[str] = field(default_factory=list)
    """Method and path with query of every request, in order."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: all watches end."""

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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.raw_path}")
        if self.script:
            step = self.script.popleft()
            if step is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if isinstance(step, str):
                return web.Response(text=step, content_type="text/html")
            if step != 200:
                status = {"kind": "Status", "reason": "Scripted", "message": "as told"}
                return web.json_response(status, status=step)
        if request.query.get("watch"):
            return await self._watch(request, int(request.query["resourceVersion"]))
        name = request.path.rpartition("/")[2]
        if request.method == "GET" and "." not in name and name.endswith("s"):
            return web.json_response(
                {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.objects.values())}
            )
        if request.method == "GET":
            return (
                web.json_response(self.objects[name])
                if name in self.objects
                else web.json_response({"reason": "NotFound"}, status=404)
            )
        return self._write(request.method, name, await request.json())

    def _write(self, method: str, name: str, body: Any) -> web.Response:
        if method == "POST":
            if body["metadata"]["name"] in self.objects:
                return web.json_response({"reason": "AlreadyExists"}, status=409)
            return web.json_response(self.put(body["metadata"]["name"], body["spec"]), status=201)
        if method == "PATCH":
            changed = patched(self.objects[name], body)
            return (
                web.json_response({"reason": "Invalid"}, status=422)
                if changed is None
                else web.json_response(self.put(name, changed["spec"]))
            )
        if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
            return web.json_response({"reason": "Conflict"}, status=409)
        return web.json_response(self.put(name, body["spec"]))

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        if version < self.oldest:
            return web.json_response({"reason": "Expired"}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        while not self.closed.is_set():
            for number, event in list(self.events):
                if number > version:
                    version = number
                    await response.write(json.dumps(event).encode() + b"\n")
            await asyncio.sleep(0.001)
        self.closed.clear()
        await response.write_eof()
        return response


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


@asynccontextmanager
async def client_of(
    server: FakeServer, folder: Path, count: CountCall | None = None, call_s: float = CALL_S
) -> AsyncIterator[ApiClient]:
    """The autoscaler's client, connected to that server."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, port = runner.addresses[0][:2]
    (folder / "token").write_text("a-token\n", encoding="ascii")
    shutil.copy(certifi.where(), folder / "ca.crt")
    try:
        async with open_client(Account(f"http://127.0.0.1:{port}", folder), count, call_s) as client:
            yield client
    finally:
        await runner.cleanup()
