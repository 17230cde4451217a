"""Objects of one kind, mirrored: listed once, then kept by a watch (Kubernetes' list-and-watch).

What is kept of an object is what `keep` makes of it. A watch that ends is begun again where it ended; one whose version
the server has forgotten begins with a new list. While the server is away the mirror stays as it was, and says so.
"""

import asyncio
import logging
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from penstock.autoscale.kubernetes.api import Api, ApiAway, ApiRefused, Document, Expired, refusal
from penstock.base.errors import PenstockError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Before trying again: doubled each time, with jitter."""

T = TypeVar("T")

log = logging.getLogger("penstock.kubernetes")


class Watched(Generic[T]):
    """path: of the collection. query: `labelSelector` or `fieldSelector`."""

    def __init__(self, api: Api, path: str, keep: Callable[[Document], T], random: Random, **query: str) -> None:
        self.objects: dict[str, T] = {}
        """By name."""
        self.is_current = False
        """A watch is open, as far as is known here."""
        self._api = api
        self._path = path
        self._keep = keep
        self._random = random
        self._query = query
        self._version: str | None = None
        """To watch from; None: it takes a list."""

    async def read(self) -> dict[str, T]:
        """What the server has now, beside the mirror: that takes news from the watch alone, for an answer to anything
        else may be older than what the watch has brought meanwhile, and nothing would come to correct it. Raises as Api
        does."""
        found = await self._api.find(self._path, **self._query)
        return {item["metadata"]["name"]: self._keep(item) for item in found["items"]}

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._follow()
                pause_s = FIRST_PAUSE_S
            except ApiRefused as error:
                self._lost(error, is_known=isinstance(error, Expired))
                self._version = None
            except ApiAway as error:
                self._lost(error)
            await asyncio.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = FIRST_PAUSE_S if self.is_current else min(2 * pause_s, MAX_PAUSE_S)

    def _lost(self, error: PenstockError, is_known: bool = False) -> None:
        if self.is_current and not is_known:
            log.warning("watch lost", extra={"path": self._path, "error": error.message})
        self.is_current = False

    async def _list(self) -> None:
        found = await self._api.find(self._path, **self._query)
        self.objects = {item["metadata"]["name"]: self._keep(item) for item in found["items"]}
        self._version = str(found["metadata"]["resourceVersion"])

    async def _follow(self) -> None:
        """One watch, to its end."""
        assert self._version is not None
        async with self._api.watch(self._path, self._version, **self._query) as events:
            self.is_current = True
            async for event in events:
                self._version = self._apply(event)

    def _apply(self, event: Document) -> str:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise refusal(int(item.get("code", 500)), str(item.get("reason", "")), str(item.get("message", "")))
        name = item["metadata"].get("name")
        if kind == "DELETED":
            self.objects.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self.objects[name] = self._keep(item)
        return str(item["metadata"]["resourceVersion"])
