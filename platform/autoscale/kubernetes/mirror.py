"""A mirror of objects of one kind: listed once, then kept up to date by a watch (Kubernetes' list-and-watch).

A mirror keeps of each object what its `keep` returns. A watch that ends is begun again at the version it had reached; a
version that the server has forgotten takes a new list. While the server does not answer, the objects stay as they were
and `is_current` is false.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Generic, TypeVar

from kubernetes.aio.client import ApiClient, ApiException, CoreV1Api, CustomObjectsApi
from kubernetes.aio.watch import Watch

from penstock.autoscale.kubernetes.client import GONE, UNREADABLE, WATCH_S, describe, is_unavailable, no_answer
from penstock.autoscale.kubernetes.resources import RAY_GROUP, RAY_VERSION, Document

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Pause before another attempt: doubled each time, with jitter."""

T = TypeVar("T")
ListCall = Callable[..., Any]
"""Lists or watches one collection: a method of the client that returns the response as it is, with its namespace and
selector bound."""

log = logging.getLogger("penstock.kubernetes")


class Mirror(Generic[T]):
    """Objects of one collection, kept up to date while `run` runs."""

    def __init__(self, name: str, call: ListCall, keep: Callable[[Document], T], random: Random) -> None:
        """name: for the log."""
        self.objects: dict[str, T] = {}
        """What was kept, by the objects' names."""
        self.is_current = False
        """Whether a watch is open, as far as is known here."""
        self._name = name
        self._call = call
        self._keep = keep
        self._random = random
        self._watch = Watch(return_type="object")  # objects stay as they are in JSON
        self._version: str | None = None
        """Version to watch from; None: a list is needed first."""

    async def read(self) -> dict[str, T]:
        """The objects that the server has now; the mirror stays as it is. It takes news from the watch alone, since an
        answer to another call may be older than what the watch has brought meanwhile, and nothing would come to correct
        it. Raises ApiException."""
        return self._keep_all(await self._read_list())

    async def run(self) -> None:
        """Keeps the mirror up to date until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._follow()
                pause_s = FIRST_PAUSE_S
            except (ApiException, *UNREADABLE) as error:
                self._note_loss(error)
                if not (isinstance(error, ApiException) and is_unavailable(error)):
                    self._version = None
            await asyncio.sleep(pause_s * (0.5 + self._random.random() / 2))
            pause_s = FIRST_PAUSE_S if self.is_current else min(2 * pause_s, MAX_PAUSE_S)

    def _note_loss(self, error: Exception) -> None:
        is_expired = isinstance(error, ApiException) and error.status == GONE
        if self.is_current and not is_expired:
            log.warning("watch lost", extra={"resource": self._name, "error": describe(error)})
        self.is_current = False

    async def _list(self) -> None:
        found = await self._read_list()
        self.objects = self._keep_all(found)
        self._version = str(found["metadata"]["resourceVersion"])

    async def _read_list(self) -> Document:
        response = await self._call()
        found: Document = await response.json(content_type=None)
        return found

    def _keep_all(self, found: Document) -> dict[str, T]:
        return {item["metadata"]["name"]: self._keep(item) for item in found["items"]}

    async def _follow(self) -> None:
        """Follows one watch to its end. Raises ApiException."""
        events = self._watch.stream(
            self._open, resource_version=self._version, timeout_seconds=WATCH_S, allow_watch_bookmarks=True
        )
        try:
            async for event in events:
                if not isinstance(event, dict):  # the client's word for a line that is no JSON
                    raise no_answer(self._name, EOFError())
                self._version = self._apply(event["type"], event["raw_object"])
        except ApiException:
            raise
        except Exception as error:  # a lost connection; Exception itself is the client's for a line that is no event
            raise no_answer(self._name, error) from error
        finally:
            await self._watch.close()

    async def _open(self, _preload_content: bool, **query: Any) -> Any:
        """Opens the watch for the client's Watch, which reads events from what this returns."""
        response = await self._call(**query)
        self.is_current = True
        return response

    def _apply(self, kind: str, item: Document) -> str:
        """Apply one event to the mirror. Returns the resourceVersion that the mirror has now."""
        name = item["metadata"].get("name")
        if kind == "DELETED":
            self.objects.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self.objects[name] = self._keep(item)
        return str(item["metadata"]["resourceVersion"])


def list_ray(client: ApiClient, namespace: str, plural: str, **selector: str) -> ListCall:
    """selector: `label_selector` or `field_selector`."""
    call = CustomObjectsApi(client).list_namespaced_custom_object_without_preload_content
    return partial(call, RAY_GROUP, RAY_VERSION, namespace, plural, **selector)


def list_pods(client: ApiClient, namespace: str, label_selector: str) -> ListCall:
    call = CoreV1Api(client).list_namespaced_pod_without_preload_content
    return partial(call, namespace, label_selector=label_selector)
