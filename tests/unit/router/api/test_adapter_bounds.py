"""Bounds of what tenants upload to /v1/adapters: sizes, places, requests, disk."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.adapters.peft import WEIGHTS_FILE
from penstock.adapters.registry import Registered
from penstock.router.api.adapters import MAX_TENANT_UPLOADS, MAX_UPLOADS
from penstock.tenancy.tenants import Limits, Settings
from penstock.wire.errors import InvalidRequest
from tests.unit.adapters.files import write
from tests.unit.router.api.adapter_fakes import FakeRemote, serving
from tests.unit.router.http_fakes import KEY


async def test_an_upload_beyond_the_bound_is_cut_off(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="adapter_model.safetensors"\r\n\r\n'
        while True:
            yield bytes(2**16)

    async with serving(tmp_path, FakeRemote(), max_bytes=2**20) as adapters:
        endless = await adapters.world.client.post(
            "/v1/adapters", content=parts(), headers={"content-type": "multipart/form-data; boundary=b"}
        )
        declared = await adapters.post({"name": "x"}, (WEIGHTS_FILE, bytes(2**21)))

        assert (endless.status_code, declared.status_code) == (413, 413)
        assert [place for place in (tmp_path / "store").iterdir() if place.is_dir()] == []


async def test_a_client_that_hangs_up_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        begun = (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="adapter_model.safetensors"\r\n\r\n'
            + bytes(2**21)
        )
        messages = iter([{"type": "http.request", "body": begun, "more_body": True}, {"type": "http.disconnect"}])
        drafts: list[list[Path]] = []

        async def receive() -> Any:
            drafts.append(list((tmp_path / "store").glob("draft-*/*")))
            return next(messages)

        async def send(_message: Any) -> None:
            raise AssertionError("there is nobody to be answered")

        headers = [
            (b"authorization", f"Bearer {KEY}".encode()),
            (b"content-type", b"multipart/form-data; boundary=b"),
        ]
        await adapters.world.app(
            {"type": "http", "method": "POST", "path": "/v1/adapters", "headers": headers}, receive, send
        )

        assert [len(files) for files in drafts] == [0, 1]
        assert [place for place in (tmp_path / "store").iterdir() if place.is_dir()] == []
        assert (await adapters.upload()).status_code == 201


async def test_no_tenant_can_take_all_the_places_for_uploads(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        begun, go_on = asyncio.Queue[None](), asyncio.Event()

        async def stalled() -> AsyncIterator[bytes]:
            begun.put_nowait(None)
            await go_on.wait()
            yield b"--b"

        headers = {"content-type": "multipart/form-data; boundary=b"}
        slow = [
            asyncio.create_task(adapters.world.client.post("/v1/adapters", content=stalled(), headers=headers))
            for _ in range(MAX_TENANT_UPLOADS)
        ]
        for _ in slow:
            await begun.get()

        refused = await adapters.upload()
        go_on.set()
        ends = [(await response).status_code for response in slow]

        assert (refused.status_code, int(refused.headers["retry-after"])) == (503, 1)
        assert f"{MAX_TENANT_UPLOADS} of them yours" in refused.text
        assert ends == [400] * MAX_TENANT_UPLOADS
        assert MAX_TENANT_UPLOADS < MAX_UPLOADS
        assert (await adapters.upload()).status_code == 201


async def test_an_upload_counts_among_the_requests_per_minute_and_against_no_other_limit(tmp_path: Path) -> None:
    async with serving(
        tmp_path, FakeRemote(), settings=Settings(limits=Limits(requests_per_minute=3, max_parallel=1))
    ) as adapters:
        uploads = [await adapters.upload(fill=fill) for fill in range(2)]
        answer = await adapters.world.chat(max_tokens=1)
        refused = await adapters.upload(fill=2)

        assert [upload.status_code for upload in uploads] == [201, 201], "what is over takes no place"
        assert [upload.headers["x-ratelimit-remaining-requests"] for upload in (*uploads, answer)] == [
            "2",
            "1",
            "0",
        ]
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 61 * 5 / 4 + 1, "a minute, and up to a quarter"
        assert adapters.registry.records["tenant-1", "mine"].version == 2


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def test_fifty_versions_stay_within_the_tenants_share_of_the_disk_and_what_was_replaced_makes_room_in_time(
    tmp_path: Path,
) -> None:
    """The share is two adapters of this size; one more may lie beside them until what it replaced is swept."""
    size = bytes_in(write(tmp_path / "one"))

    async with serving(tmp_path, FakeRemote(), max_bytes=size, max_per_tenant=2) as adapters:
        responses = []
        for fill in range(50):
            responses.append(await adapters.upload(fill=fill))
            assert bytes_in(tmp_path / "store") <= 3 * size

        assert [response.status_code for response in responses] == [201] * 3 + [429] * 47
        assert f"take {3 * size} bytes" in responses[-1].text
        assert int(responses[-1].headers["retry-after"]) > 900
        assert adapters.registry.records["tenant-1", "mine"].version == 3, "what was refused changed nothing"
        for response in responses[:2]:
            os.utime(adapters.store.path(response.json()["digest"]), (1, 1))
        assert (await adapters.upload(fill=50)).status_code == 201, "nobody had to ask for a sweep"
        assert bytes_in(tmp_path / "store") == 2 * size


async def test_two_versions_by_turns_are_two_files_however_often_they_change_places(tmp_path: Path) -> None:
    size = bytes_in(write(tmp_path / "one"))

    async with serving(tmp_path, FakeRemote(), max_bytes=size, max_per_tenant=2) as adapters:
        assert [(await adapters.upload(fill=turn % 2)).status_code for turn in range(50)] == [201] * 50
        assert bytes_in(tmp_path / "store") == 2 * size


async def test_what_was_stored_and_then_not_registered_counts_too(tmp_path: Path) -> None:
    size = bytes_in(write(tmp_path / "one"))

    async with serving(tmp_path, FakeRemote(), max_bytes=size, max_per_tenant=1) as adapters:

        async def refuse(*_: object) -> Registered:
            raise InvalidRequest("You have 1 adapters already, which is the most; delete one.")

        adapters.registry.put = refuse  # type: ignore[method-assign]

        assert [(await adapters.upload(fill=fill)).status_code for fill in range(4)] == [400, 400, 429, 429]


async def test_no_upload_begins_that_could_fill_the_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    async with serving(tmp_path, FakeRemote(), max_bytes=free) as adapters:
        refused = await adapters.upload()

        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (
            503,
            "overloaded",
            "60",
        )
        assert "not enough room" in refused.text
        assert bytes_in(tmp_path / "store") == 0
