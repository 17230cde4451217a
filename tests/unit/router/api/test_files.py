"""/v1/files over HTTP, with a real Redis and a real folder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from penstock.base.redis import connect
from penstock.router.api import files as pages
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.dependencies import BatchDependencies, make_dependencies
from penstock.router.models.served_model import ServedModel
from penstock.tenancy.keys import record_of
from penstock.tenancy.tenants import Limits, Record, Settings, settings_key
from tests.unit.router.http_fakes import SECRET, World, running_gateway

OTHER_KEY = "sk-penstock-" + "fedcba9876543210" * 3
OTHER = {"Authorization": f"Bearer {OTHER_KEY}"}


@asynccontextmanager
async def keeping(
    url: str, folder: Path, settings: Settings | None = None, model: ServedModel | None = None, **config: float
) -> AsyncIterator[tuple[World, BatchDependencies]]:
    """A gateway with two tenants, and a Redis that holds no files of theirs."""
    async with connect(url) as client:
        parts = make_dependencies(BatchesConfig(folder=str(folder), **config), client)  # type: ignore[arg-type]
        for tenant in ("tenant-1", "tenant-2"):
            for file in await parts.files.all(tenant):
                await parts.files.remove(tenant, file.id)
            for batch in await parts.batches.all(tenant):
                await parts.batches.forget(tenant, batch.id)
        async with running_gateway(batches=parts, settings=settings, model=model) as world:
            name, value = record_of(SECRET, "tenant-2", OTHER_KEY)
            world.store.data |= {
                name: value,
                settings_key("tenant-2"): msgspec.json.encode(Record(created=0, updated=0)),
            }
            yield world, parts


async def upload(
    world: World, text: bytes = b"{}\n", name: str = "in.jsonl", headers: dict[str, str] | None = None, **fields: str
) -> httpx.Response:
    data = {"purpose": "batch", **fields}
    return await world.client.post("/v1/files", data=data, files={"file": (name, text)}, headers=headers)


def texts_in(folder: Path) -> list[Path]:
    return list(folder.rglob("file-*"))


async def test_a_file_is_brought_listed_read_and_deleted(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, parts):
        text = bytes(range(256)) * 4096 + b"\nend"
        made = (await upload(world, text, "../../etc/in.jsonl")).json()

        assert made["object"] == "file"
        assert (made["bytes"], made["filename"], made["purpose"]) == (len(text), "in.jsonl", "batch")
        assert made["expires_at"] - made["created_at"] == 30 * 86400
        path = f"/v1/files/{made['id']}"
        assert (await world.client.get(path)).json() == made
        assert (await world.client.get("/v1/files")).json()["data"] == [made]
        content = await world.client.get(f"{path}/content")
        assert content.content == text
        assert content.headers["content-type"] == "application/octet-stream"
        head = await world.client.head(f"{path}/content")
        assert (head.content, head.headers["content-length"]) == (b"", str(len(text)))
        assert [each.name for each in (folder / "tenant-1").iterdir()] == [made["id"]]
        assert (await world.client.delete(path)).json() == {"id": made["id"], "object": "file", "deleted": True}
        for answer in (await world.client.get(path), await world.client.get(f"{path}/content")):
            assert answer.status_code == 404
        assert list((folder / "tenant-1").iterdir()) == []
        assert await parts.files.held_bytes("tenant-1") == 0


async def test_another_tenants_files_do_not_exist(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        path = f"/v1/files/{(await upload(world)).json()['id']}"

        for method, place in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await world.client.request(method, place, headers=OTHER)).status_code == 404
        assert (await world.client.get("/v1/files", headers=OTHER)).json()["data"] == []
        assert (await world.client.get(path)).status_code == 200
        assert (await world.client.get(path, headers={"Authorization": ""})).status_code == 401


@pytest.mark.parametrize("place", ["..", "../tenant-2/x", "file-%2e%2e", "file-1/../../x/content", "", "x" * 3000])
async def test_an_id_that_is_none_leads_nowhere(place: str, batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        assert (await world.client.get(f"/v1/files/{place}")).status_code in (404, 405)


async def test_lists_come_in_pages_by_purpose_and_age(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        made = {(await upload(world, name=f"{number}")).json()["id"] for number in range(5)}

        first = (await world.client.get("/v1/files", params={"limit": 3})).json()
        second = (await world.client.get("/v1/files", params={"limit": 3, "after": first["last_id"]})).json()
        assert (first["has_more"], second["has_more"]) == (True, False)
        assert {row["id"] for row in first["data"] + second["data"]} == made
        assert len(first["data"] + second["data"]) == 5
        assert (await world.client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        ascending = (await world.client.get("/v1/files", params={"order": "asc"})).json()["data"]
        assert ascending == (first["data"] + second["data"])[::-1]
        assert (await world.client.get("/v1/files", params={"limit": "x"})).status_code == 400


async def test_a_tenant_has_no_more_bytes_than_it_may(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder, max_tenant_bytes=100) as (world, _):
        assert (await upload(world, b"x" * 60)).status_code == 200
        refused = await upload(world, b"x" * 41)

        assert refused.status_code == 400
        assert "may take 100 (batches.max_tenant_bytes)" in refused.json()["error"]["message"]
        assert len(list((folder / "tenant-1").iterdir())) == 1, "nothing of it is left"
        assert (await upload(world, b"x" * 90, headers=OTHER)).status_code == 200
        declared = await upload(world, b"x" * 200_000)
        assert declared.status_code == 400


async def test_a_file_that_is_too_large_is_refused(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder, max_file_bytes=1000) as (world, _):
        assert (await upload(world, b"x" * 1001)).status_code == 400
        assert (await upload(world, b"x" * 100_000)).status_code == 413
        assert (await upload(world, b"x" * 1000)).status_code == 200
        assert len(list((folder / "tenant-1").iterdir())) == 1


async def test_a_form_must_say_what_it_is_for(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        for answer in (
            await upload(world, purpose="fine-tune"),
            await upload(world, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}),
            await upload(world, **{"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}),
            await upload(world, **{"expires_after[anchor]": "created_at"}),
            await upload(world, name_="x"),
            await world.client.post("/v1/files", json={"purpose": "batch"}),
            await world.client.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"x": b""},
                headers={"content-type": "multipart/form-data"},
            ),
        ):
            assert answer.status_code == 400, answer.text
        made = await upload(world, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        assert made.json()["expires_at"] - made.json()["created_at"] == 3600
        assert len(list((folder / "tenant-1").iterdir())) == 1


async def test_a_client_that_hangs_up_leaves_nothing(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        began = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2**21
            began.set()
            await asyncio.Event().wait()

        headers = {"content-type": "multipart/form-data; boundary=b"}
        posting = asyncio.create_task(world.client.post("/v1/files", content=body(), headers=headers))
        await began.wait()
        assert len(list((folder / "tenant-1").iterdir())) == 1
        posting.cancel()
        await asyncio.wait([posting])

        assert list((folder / "tenant-1").iterdir()) == []


async def test_uploads_are_bounded_and_count_among_requests(
    batch_redis: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_TENANT_UPLOADS", 0)
    async with keeping(batch_redis, folder) as (world, _):
        assert (await upload(world)).status_code == 503
    monkeypatch.undo()
    async with keeping(batch_redis, folder, Settings(limits=Limits(requests_per_minute=1))) as (world, _):
        assert (await upload(world)).status_code == 503, "limits can't be checked here"
    monkeypatch.setattr(pages, "MIN_FREE_BYTES", 2**60)
    async with keeping(batch_redis, folder) as (world, _):
        assert (await upload(world)).status_code == 503


async def test_a_file_that_a_batch_reads_stays_until_it_is_cancelled(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, parts):
        file = (await upload(world)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await world.client.post("/v1/batches", json=body)).json()

        refused = await world.client.delete(f"/v1/files/{file}")
        assert refused.status_code == 400
        assert batch["id"] in refused.json()["error"]["message"]
        record = await parts.batches.get("tenant-1", batch["id"])
        assert record is not None
        await parts.batches.replace("tenant-1", record, record.move_to("cancelled", 1.0))
        assert (await world.client.delete(f"/v1/files/{file}")).status_code == 200


async def test_without_a_folder_there_are_no_files_and_no_batches() -> None:
    async with running_gateway() as world:
        for path in ("/v1/files", "/v1/files/file-1", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/b"):
            answer = await world.client.get(path)

            assert answer.status_code == 404
            assert "no folder is set for them (batches.folder)" in answer.json()["error"]["message"]


async def test_without_redis_files_are_overloaded(folder: Path) -> None:
    async with connect("unix:///nonexistent/redis.sock") as client:
        parts = make_dependencies(BatchesConfig(folder=str(folder)), client)
        async with running_gateway(batches=parts) as world:
            assert (await upload(world)).status_code == 503
            assert (await world.client.get("/v1/files")).status_code == 503
            assert (await world.client.get("/v1/batches")).status_code == 503
            assert texts_in(folder) == []
