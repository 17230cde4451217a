import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.autoscale.kubernetes.mirror import Mirror, list_pods
from tests.unit.autoscale.kubernetes.api_fake import FakeServer, client_of


@asynccontextmanager
async def watching(server: FakeServer, folder: Path) -> AsyncIterator[Mirror[Any]]:
    async with client_of(server, folder) as client:
        mirror: Mirror[Any] = Mirror(
            "pods", list_pods(client, "n", "a=b"), lambda item: item["spec"].get("x"), Random(1)
        )
        running = asyncio.create_task(mirror.run())
        try:
            yield mirror
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.001)


def calls(server: FakeServer) -> list[str]:
    return ["watch" if "watch=true" in line else "list" for line in server.seen]


async def test_what_is_there_is_listed_and_what_changes_is_watched(tmp_path: Path) -> None:
    server = FakeServer()
    server.put("p1", {"x": 1})
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.objects == {"p1": 1} and mirror.is_current)
        server.put("p2", {"x": 2})
        server.put("p1", {"x": 3})
        await until(lambda: mirror.objects == {"p1": 3, "p2": 2})
        server.remove("p1")
        await until(lambda: mirror.objects == {"p2": 2})
    assert calls(server) == ["list", "watch"]
    assert all("labelSelector=a%3Db" in line for line in server.seen)


async def test_a_watch_that_ends_goes_on_where_it_ended_without_a_list(tmp_path: Path) -> None:
    server = FakeServer()
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.put("p1", {"x": 1})
        await until(lambda: mirror.objects)
        server.closed.set()
        await until(lambda: not server.closed.is_set())
        server.put("p2", {"x": 2})
        await until(lambda: len(mirror.objects) == 2)
    assert calls(server) == ["list", "watch", "watch"]
    assert "resourceVersion=101" in server.seen[-1]


async def test_an_expired_version_takes_a_new_list_and_forgets_what_has_gone_meanwhile(tmp_path: Path) -> None:
    server = FakeServer()
    server.put("p1", {"x": 1})
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.script.append(410)
        server.closed.set()
        await until(lambda: not server.closed.is_set())
        server.objects.clear()
        server.put("p2", {"x": 2})
        server.oldest = server.version
        await until(lambda: mirror.objects == {"p2": 2})
    assert calls(server) == ["list", "watch", "watch", "list", "watch"]


async def test_an_error_event_in_a_watch_is_as_good_as_a_status(tmp_path: Path) -> None:
    server = FakeServer()
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.version += 1
        server.events.append(
            (server.version, {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})
        )
        await until(lambda: calls(server).count("list") == 2)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ERROR", "object": {"code": 500}},
        {"type": "ADDED"},
        {"type": "ADDED", "object": {"metadata": {}}},
        {"type": "ADDED", "object": None},
    ],
    ids=["error without a reason", "no object", "no version", "null"],
)
async def test_an_event_that_is_none_ends_the_watch_and_not_the_mirror(tmp_path: Path, event: dict[str, Any]) -> None:
    server = FakeServer()
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.version += 1
        server.events.append((server.version, event))
        await until(lambda: not mirror.is_current)
        server.events.clear()
        server.put("p1", {"x": 1})
        await until(lambda: mirror.objects == {"p1": 1})


@pytest.mark.parametrize("page", ["<html>maintenance</html>", "{}", "[]", '{"items": [{}]}'])
async def test_a_list_that_is_none_is_asked_for_again(tmp_path: Path, page: str) -> None:
    server = FakeServer()
    server.put("p1", {"x": 1})
    server.script.extend([page])
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.objects == {"p1": 1} and mirror.is_current)
    assert calls(server)[:2] == ["list", "list"]


async def test_an_object_of_a_megabyte_comes_by_the_watch(tmp_path: Path) -> None:
    server = FakeServer()
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.put("p1", {"x": "y" * 1_400_000})
        await until(lambda: len(mirror.objects.get("p1", "")) == 1_400_000)
    assert calls(server) == ["list", "watch"]


async def test_while_the_server_is_away_the_mirror_stays_and_says_so(tmp_path: Path) -> None:
    server = FakeServer()
    server.put("p1", {"x": 1})
    async with watching(server, tmp_path) as mirror:
        await until(lambda: mirror.is_current)
        server.script.extend([None, 503, 200])
        server.closed.set()
        await until(lambda: not mirror.is_current)
        assert mirror.objects == {"p1": 1}
        await until(lambda: mirror.is_current)
        server.put("p1", {"x": 2})
        await until(lambda: mirror.objects == {"p1": 2})
    assert calls(server).count("list") == 1, "what was missed came with the watch"
