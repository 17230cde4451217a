"""/v1/adapters over HTTP, with a registry in a dictionary, a real store, and replicas that do what the test says."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from penstock.adapters.config import AdaptersConfig
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.registry import Adapter, Registered, Registry
from penstock.adapters.store import AdapterStore
from penstock.router.api.adapters import MAX_TENANT_UPLOADS, MAX_UPLOADS
from penstock.router.config import AdapterBase, PoolSpec, ProviderConfig
from penstock.router.models.adapter_models import AdapterDependencies, AdapterModels
from penstock.router.models.served_model import ServedModel
from penstock.router.replicas.adapter_placement import AdapterPlacer
from penstock.router.routing.request import Route
from penstock.tenancy.tenants import Limits, Settings
from penstock.wire.adapters import AdapterList, AdapterOut
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Load, StepCosts
from tests.unit.adapters.files import BASE, tensors_of, write
from tests.unit.router.http_fakes import CONTEXT, KEY, MODEL, TOKENIZER, World, running_gateway

DIGEST = "0123456789abcdef"
COSTS = StepCosts(base_s=0.01)


class FakeRegistry:
    """The interface of Registry, without Redis."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], Registered] = {}

    async def put(self, tenant: str, name: str, adapter: Adapter) -> Registered:
        before = self.records.get((tenant, name))
        if before is None or before.adapter.digest != adapter.digest:
            self.records[tenant, name] = Registered(adapter, 1 if before is None else before.version + 1)
        return self.records[tenant, name]

    async def get(self, tenant: str, name: str) -> Registered | None:
        return self.records.get((tenant, name))

    async def all(self, tenant: str) -> dict[str, Registered]:
        return {name: registered for (owner, name), registered in sorted(self.records.items()) if owner == tenant}

    async def remove(self, tenant: str, name: str) -> Registered | None:
        return self.records.pop((tenant, name), None)

    async def owned_digests(self) -> set[str]:
        return {registered.adapter.digest for registered in self.records.values()}


@dataclass
class FakeRemote:
    """A replica that loads at once, if at all."""

    error: str | None = None
    ignores_loads: bool = False
    resident: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    num_reports: int = 0
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def load(self) -> Load:
        self.num_reports += 1
        return Load(
            "epoch",
            0,
            1,
            0,
            0,
            0,
            0,
            1,
            1,
            COSTS,
            1,
            resident_adapters=tuple(self.resident),
            failed_adapters=self.failed,
        )

    def load_adapter(self, digest: str) -> None:
        if self.error is not None:
            self.failed = ((digest, self.error),)
        elif not self.ignores_loads:
            self.resident.append(digest)

    def drop_adapter(self, digest: str) -> None:
        self.dropped.append(digest)


@dataclass
class Adapters:
    world: World
    registry: FakeRegistry
    store: AdapterStore
    remotes: list[FakeRemote]
    files: Path

    async def upload(self, name: str = "mine", fill: int = 0, **changes: Any) -> httpx.Response:
        folder = write(self.files / os.urandom(4).hex(), fill=fill, **changes)
        return await self.post(
            {"name": name}, *((file, (folder / file).read_bytes()) for file in (CONFIG_FILE, WEIGHTS_FILE))
        )

    async def post(self, fields: dict[str, str], *files: tuple[str, bytes]) -> httpx.Response:
        return await self.world.client.post("/v1/adapters", data=fields, files=[("file", file) for file in files])

    async def get(self, path: str) -> httpx.Response:
        return await self.world.client.get(path)


def pool(name: str, model: str = "checkpoint", max_rank: int | None = 4) -> PoolSpec:
    base = None if max_rank is None else AdapterBase(shapes=BASE, max_rank=max_rank)
    return PoolSpec(
        name=name,
        served_names=(MODEL,),
        tier="edge",
        model=model,
        app_name=f"pool-{name}",
        adapters=base,
        max_model_len=CONTEXT,
    )


PROVIDER = ProviderConfig(name="p", base_url="http://provider.test/v1", served_names=(MODEL,), model="large")
SERVED = ServedModel(
    MODEL,
    ("pool-a", "pool-b"),
    TOKENIZER,
    lambda: CONTEXT,
    DIGEST,
    routes=(Route("edge", ("pool-a", "pool-b")), Route("cloud", (), provider="p")),
)


@asynccontextmanager
async def serving(
    tmp_path: Path,
    *remotes: FakeRemote,
    models: Iterable[ServedModel] = (SERVED,),
    settings: Settings | None = None,
    **config: Any,
) -> AsyncIterator[Adapters]:
    """pool-a serves adapters, pool-b does not."""
    registry, store = FakeRegistry(), AdapterStore(tmp_path / "store")
    by_name = {model.name: model for model in models}
    adapter_models = AdapterModels(
        cast(Registry, registry), by_name, {"pool-a": pool("pool-a"), "pool-b": pool("pool-b", max_rank=None)}
    )

    def ready(pools: Iterable[str]) -> Iterable[FakeRemote]:
        wanted = tuple(pools)
        assert wanted in ((), ("pool-a",))
        return remotes if wanted else ()

    deps = AdapterDependencies(
        AdaptersConfig(load_timeout_s=0.05, **config),
        cast(Registry, registry),
        store,
        adapter_models,
        AdapterPlacer(ready),
    )
    async with running_gateway(
        models=by_name, adapters=deps, settings=settings, providers=(PROVIDER,), num_gateways=1
    ) as world:
        yield Adapters(world, registry, store, list(remotes), tmp_path / "files")


async def test_an_uploaded_adapter_is_stored_registered_loaded_and_named_by_the_next_request(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote(), FakeRemote()) as adapters:
        created = await adapters.upload()
        answers = [await adapters.world.chat(model=model) for model in ("mine", f"{MODEL}:mine", MODEL)]

        digest = adapters.registry.records["tenant-1", "mine"].adapter.digest
        assert created.status_code == 201
        assert created.json() | {"created": 0} == {
            "id": "mine",
            "object": "adapter",
            "created": 0,
            "base_model": MODEL,
            "digest": digest,
            "version": 1,
            "rank": 2,
            "target_modules": ["down_proj", "q_proj"],
            "size_bytes": created.json()["size_bytes"],
            "state": "loaded",
            "replicas": {"live": 2, "loaded": 2},
            "error": None,
        }
        assert adapters.store.path(digest).is_dir()
        assert [answer.json()["model"] for answer in answers] == ["mine", f"{MODEL}:mine", MODEL]
        generations = adapters.world.dispatcher.generations
        assert [generation.adapter for generation in generations] == [digest, digest, None]
        assert [generation.pools for generation in generations] == [
            ("pool-a",),
            ("pool-a",),
            ("pool-a", "pool-b", "p"),
        ]
        assert answers[0].json()["system_fingerprint"] == f"fp_{DIGEST[:12]}_{digest[:12]}"


async def test_the_state_says_how_far_the_replicas_are(tmp_path: Path) -> None:
    remotes = FakeRemote(), FakeRemote(ignores_loads=True), FakeRemote(error="It does not fit.")
    async with serving(tmp_path, *remotes) as adapters:
        partly = (await adapters.upload()).json()
        remotes[0].resident.clear()
        stored = (await adapters.get("/v1/adapters/mine")).json()

        assert (partly["state"], partly["replicas"], partly["error"]) == (
            "partly_loaded",
            {"live": 3, "loaded": 1},
            "It does not fit.",
        )
        assert (stored["state"], stored["replicas"]["loaded"]) == ("stored", 0)


async def test_names_are_the_tenants_own(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        await adapters.upload()
        adapters.registry.records["tenant-2", "theirs"] = adapters.registry.records["tenant-1", "mine"]

        assert [adapter["id"] for adapter in (await adapters.get("/v1/adapters")).json()["data"]] == ["mine"]
        assert [model["id"] for model in (await adapters.get("/v1/models")).json()["data"]] == [MODEL, "mine"]
        assert (await adapters.get("/v1/models/mine")).json()["parent"] == MODEL
        for path in ("/v1/adapters/theirs", "/v1/models/theirs"):
            assert (await adapters.get(path)).status_code == 404
        assert (await adapters.world.chat(model="theirs")).json()["error"]["code"] == "model_not_found"
        assert (await adapters.world.client.delete("/v1/adapters/theirs")).status_code == 404


async def test_a_deleted_adapter_ends_at_once_and_replicas_drop_it_unless_somebody_else_owns_the_files(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        for name in ("first", "second"):
            await adapters.upload(name)
        digest = adapters.registry.records["tenant-1", "first"].adapter.digest

        deleted = await adapters.world.client.delete("/v1/adapters/first")
        dropped_early = list(adapters.remotes[0].dropped)
        await adapters.world.client.delete("/v1/adapters/second")

        assert deleted.json() == {"id": "first", "object": "adapter", "deleted": True}
        assert (await adapters.world.chat(model="first")).status_code == 404
        assert dropped_early == []
        assert adapters.remotes[0].dropped == [digest]
        assert adapters.store.path(digest).is_dir(), "an answer under way may need it on another replica"


async def test_a_replaced_adapter_has_a_new_version_and_the_old_one_is_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        versions = [(await adapters.upload(fill=fill)).json() for fill in (0, 1, 1)]

        assert [found["version"] for found in versions] == [1, 2, 2]
        assert adapters.remotes[0].dropped == [versions[0]["digest"]]
        await adapters.world.chat(model="mine")
        assert adapters.world.dispatcher.generations[-1].adapter == versions[1]["digest"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda adapters: adapters.upload(MODEL), "is the name of a model"),
        (lambda adapters: adapters.upload("a/b"), "1 to 64 letters"),
        (lambda adapters: adapters.upload(r=5, tensors=tensors_of(rank=5)), "serves ranks up to 4"),
        (lambda adapters: adapters.upload(use_dora=True), "DoRA"),
        (lambda adapters: adapters.post({"name": "x"}, ("adapter_model.bin", b"")), "is a pickle"),
        (
            lambda adapters: adapters.post({"name": "x"}, (CONFIG_FILE, b"{}")),
            "lacks the file adapter_model.safetensors",
        ),
        (
            lambda adapters: adapters.post({"name": "x"}, (CONFIG_FILE, b"{}"), (CONFIG_FILE, b"{}")),
            "holds adapter_config.json twice",
        ),
        (lambda adapters: adapters.post({"name": "x", "colour": "red"}, (CONFIG_FILE, b"{}")), "has a field 'colour'"),
        (lambda adapters: adapters.post({"name": "x" * 5000}, (CONFIG_FILE, b"{}")), "is longer than 4096 bytes"),
        (
            lambda adapters: adapters.world.client.post("/v1/adapters", json={"name": "x", "path": "y"}),
            "has no import folder",
        ),
        (
            lambda adapters: adapters.world.client.post("/v1/adapters", json={"name": "x"}),
            "Missing required parameter: 'path'",
        ),
        (
            lambda adapters: adapters.world.client.post(
                "/v1/adapters", content=b"--b", headers={"content-type": "multipart/form-data"}
            ),
            "has no boundary",
        ),
        (
            lambda adapters: adapters.world.client.post(
                "/v1/adapters", content=b"nonsense", headers={"content-type": "multipart/form-data; boundary=b"}
            ),
            "is no multipart/form-data",
        ),
        (
            lambda adapters: adapters.world.client.post(
                "/v1/adapters",
                content=b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nx',
                headers={"content-type": "multipart/form-data; boundary=b"},
            ),
            "ends in the middle",
        ),
    ],
)
async def test_what_is_refused_leaves_nothing_behind(
    change: Callable[[Adapters], Any], sentence: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        response = await change(adapters)

        assert response.status_code == 400
        assert sentence in response.json()["error"]["message"]
        assert adapters.registry.records == {}
        assert adapters.remotes[0].resident == []
        assert [place for place in (tmp_path / "store").iterdir() if place.is_dir()] == []


async def test_a_refused_replacement_leaves_the_adapter_as_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        before = (await adapters.upload()).json()

        assert (await adapters.upload(fill=1, use_dora=True)).status_code == 400

        assert (await adapters.get("/v1/adapters/mine")).json() == before


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


async def test_an_import_comes_from_the_tenants_own_folder_only(tmp_path: Path) -> None:
    write(tmp_path / "imports" / "tenant-1" / "good")
    write(tmp_path / "imports" / "tenant-2" / "theirs")
    (tmp_path / "imports" / "tenant-1" / "link").symlink_to(tmp_path / "imports" / "tenant-2" / "theirs")
    linked = tmp_path / "imports" / "tenant-1" / "linked"
    linked.mkdir()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        (linked / file).symlink_to(tmp_path / "imports" / "tenant-2" / "theirs" / file)
    pickled = tmp_path / "imports" / "tenant-1" / "pickled"
    pickled.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"")

    async with serving(tmp_path, FakeRemote(), import_folder=str(tmp_path / "imports")) as adapters:

        async def imported(path: str) -> tuple[int, str]:
            response = await adapters.world.client.post("/v1/adapters", json={"name": "mine", "path": path})
            return response.status_code, response.text

        (tmp_path / "imports" / "tenant-1" / "ring").symlink_to("ring")
        foreign = ("../tenant-2/theirs", "link", str(tmp_path / "imports" / "tenant-2" / "theirs"))
        for path in (*foreign, "missing", "linked", "ring", "a\0b", "x" * 5000, "a/" * 3000):
            assert (await imported(path))[0] == 400, path
        assert "is a pickle" in (await imported("pickled"))[1]
        assert (await imported("good"))[0] == 201
        assert (tmp_path / "imports" / "tenant-1" / "good" / WEIGHTS_FILE).is_file(), "an import is a copy"


async def test_with_several_base_models_one_must_be_named(tmp_path: Path) -> None:
    large = replace(SERVED, name="large", digest="f" * 16)

    async with serving(tmp_path, FakeRemote(), models=(SERVED, large)) as adapters:
        folder = write(tmp_path / "a")
        files = [(file, (folder / file).read_bytes()) for file in (CONFIG_FILE, WEIGHTS_FILE)]

        unnamed = await adapters.post({"name": "mine"}, *files)
        unknown = await adapters.post({"name": "mine", "base_model": "huge"}, *files)
        named = await adapters.post({"name": "mine", "base_model": "large"}, *files)

        assert "name the one it was made for: tiny, large" in unnamed.json()["error"]["message"]
        assert "No model 'huge' is served with adapters; there are: tiny, large" in unknown.json()["error"]["message"]
        assert named.json()["base_model"] == "large"
        assert (await adapters.world.chat(model="large:mine")).status_code == 200
        assert (await adapters.world.chat(model=f"{MODEL}:mine")).status_code == 404


async def test_a_tenant_that_may_not_use_the_base_model_may_not_use_an_adapter_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote(), settings=Settings(models=("another",))) as adapters:
        refused = await adapters.upload()
        adapter = Adapter("d" * 32, MODEL, DIGEST, 2, ("q_proj",), 1, 0)
        await adapters.registry.put("tenant-1", "mine", adapter)

        assert (refused.status_code, "No model here" in refused.text) == (400, True)
        assert (await adapters.world.chat(model="mine")).status_code == 403
        assert (await adapters.get("/v1/models")).json()["data"] == []


async def test_an_adapter_of_a_checkpoint_that_is_served_no_more_is_not_found(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        await adapters.registry.put(
            "tenant-1", "old", Adapter("d" * 32, MODEL, "another checkpoint", 2, ("q_proj",), 1, 0)
        )

        assert (await adapters.world.chat(model="old")).status_code == 404
        assert [model["id"] for model in (await adapters.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await adapters.get("/v1/adapters/old")).status_code == 200, "it can still be seen and deleted"


async def test_a_gateway_without_adapters_says_so(tmp_path: Path) -> None:
    async with running_gateway() as world:
        for method, path in (
            ("GET", "/v1/adapters"),
            ("POST", "/v1/adapters"),
            ("GET", "/v1/adapters/x"),
            ("DELETE", "/v1/adapters/x"),
        ):
            response = await world.client.request(method, path)
            assert (response.status_code, response.json()["error"]["message"]) == (
                404,
                "This gateway serves no adapters.",
            )


async def test_usage_and_metrics_call_an_adapter_by_what_they_may(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        await adapters.upload()
        await adapters.world.chat(model="mine")

        rendered = adapters.world.metrics.render().decode()
        assert f'model="{MODEL}"' in rendered
        assert "mine" not in rendered


async def test_what_nobody_owns_any_more_is_swept_when_it_is_old(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote()) as adapters:
        old = (await adapters.upload("old")).json()["digest"]
        await adapters.world.client.delete("/v1/adapters/old")
        os.utime(adapters.store.path(old), (1, 1))

        kept = (await adapters.upload("kept", fill=1)).json()["digest"]

        assert not adapters.store.path(old).exists()
        assert adapters.store.path(kept).is_dir()


async def test_the_pages_are_what_the_description_says(tmp_path: Path) -> None:

    async with serving(tmp_path, FakeRemote()) as adapters:
        created = await adapters.upload()

        assert msgspec.json.decode(created.content, type=AdapterOut).id == "mine"
        assert len(msgspec.json.decode((await adapters.get("/v1/adapters")).content, type=AdapterList).data) == 1
