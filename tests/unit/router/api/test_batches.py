"""/v1/batches over HTTP, with a real Redis; nobody runs them here."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.router.api.test_files import OTHER, keeping, upload
from tests.unit.router.batches.batch_fakes import lines
from tests.unit.router.http_fakes import World


async def create(world: World, file: str, **fields: Any) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return await world.client.post("/v1/batches", json=body)


async def test_a_batch_is_created_listed_and_read(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        file = (await upload(world, lines(3))).json()["id"]
        made = (await create(world, file, metadata={"a": "b"})).json()

        assert (made["object"], made["status"], made["input_file_id"]) == ("batch", "validating", file)
        assert made["expires_at"] - made["created_at"] == 86400
        assert made["metadata"] == {"a": "b"}
        assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert (await world.client.get(f"/v1/batches/{made['id']}")).json() == made
        more = [(await create(world, file)).json()["id"] for _ in range(2)]
        first = (await world.client.get("/v1/batches", params={"limit": 2})).json()
        second = (await world.client.get("/v1/batches", params={"after": first["last_id"]})).json()
        assert {row["id"] for row in first["data"] + second["data"]} == {made["id"], *more}
        assert (first["has_more"], second["has_more"]) == (True, False)


async def test_a_batch_keeps_the_header_by_which_its_lines_stay(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        file = (await upload(world, lines(3))).json()["id"]
        plain = await create(world, file)
        world.client.headers["x-penstock-stay"] = "edge"
        staying = await create(world, file)
        world.client.headers["x-penstock-stay"] = "cloud"
        refused = await create(world, file)
        del world.client.headers["x-penstock-stay"]
        read = await world.client.get(f"/v1/batches/{staying.json()['id']}")

        said = [answer.headers.get("x-penstock-stay") for answer in (plain, staying, read)]
        assert said == [None, "edge", "edge"]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-penstock-stay")


async def test_another_tenants_batches_do_not_exist_nor_may_its_files_be_used(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        file = (await upload(world, lines(3))).json()["id"]
        batch = f"/v1/batches/{(await create(world, file)).json()['id']}"

        assert (await world.client.get(batch, headers=OTHER)).status_code == 404
        assert (await world.client.post(f"{batch}/cancel", headers=OTHER)).status_code == 404
        assert (await world.client.get("/v1/batches", headers=OTHER)).json()["data"] == []
        world.client.headers.update(OTHER)
        refused = await create(world, file)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"complete_window": "24h"}, "complete_window"),
    ],
)
async def test_what_cant_be_is_refused_with_its_name(
    fields: dict[str, Any], param: str, batch_redis: str, folder: Path
) -> None:
    async with keeping(batch_redis, folder) as (world, _):
        file = (await upload(world, lines(3))).json()["id"]
        refused = await create(world, file, **fields)

        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert (await world.client.get("/v1/batches")).json()["data"] == []


async def test_a_batch_is_cancelled_once_and_not_after_its_end(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder) as (world, parts):
        file = (await upload(world, lines(3))).json()["id"]
        batch = (await create(world, file)).json()["id"]

        for _ in range(2):
            cancelled = await world.client.post(f"/v1/batches/{batch}/cancel")
            assert cancelled.json()["status"] == "cancelling"
            assert cancelled.json()["cancelling_at"] is not None
        record = await parts.batches.get("tenant-1", batch)
        assert record is not None
        await parts.batches.replace("tenant-1", record, record.move_to("cancelled", 1.0))
        refused = await world.client.post(f"/v1/batches/{batch}/cancel")
        assert refused.status_code == 400
        assert "The batch is cancelled" in refused.json()["error"]["message"]
        assert (await world.client.post("/v1/batches/batch_none/cancel")).status_code == 404
        assert (await world.client.delete(f"/v1/batches/{batch}")).status_code == 405


async def test_a_tenants_lines_that_wait_are_bounded(batch_redis: str, folder: Path) -> None:
    async with keeping(batch_redis, folder, max_tenant_lines=5) as (world, _):
        file = (await upload(world, lines(3))).json()["id"]
        assert (await create(world, file)).status_code == 200
        refused = await create(world, file)

        assert refused.status_code == 400
        assert "5 lines that wait" in refused.json()["error"]["message"]
        world.client.headers.update(OTHER)
        other = (await upload(world, lines(5))).json()["id"]
        assert (await create(world, other)).status_code == 200
