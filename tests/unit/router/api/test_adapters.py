"""/v1/adapters: what is uploaded or imported, named, replaced, deleted and refused."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.registry import Adapter, Registered
from penstock.tenancy.tenants import Settings
from penstock.wire.adapters import AdapterList, AdapterOut
from penstock.wire.frames import AdapterCount
from tests.unit.adapters.files import tensors_of, write
from tests.unit.router.api.adapter_fakes import DIGEST, SERVED, Adapters, FakeRemote, serving
from tests.unit.router.fleet_fakes import FakeMember
from tests.unit.router.http_fakes import MODEL, running_gateway

ADAPTER = Adapter("0" * 32, MODEL, DIGEST, 2, ("q_proj",), 100, 1)


async def test_an_uploaded_adapter_is_stored_registered_loaded_and_named_by_the_next_request(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote(member=FakeMember("b")), FakeRemote()) as adapters:
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
            "replicas": {"live": 2, "loaded": 2, "where": ["a", "b"]},
            "uses": {"hits": 0, "waits": 0, "loads": 0, "evictions": 0},
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
            {"live": 3, "loaded": 1, "where": ["a"]},
            "It does not fit.",
        )
        assert (stored["state"], stored["replicas"]["loaded"]) == ("stored", 0)


async def test_uses_are_the_tenants_own_at_all_replicas(tmp_path: Path) -> None:
    remotes = FakeRemote(), FakeRemote(member=FakeMember("b"))
    async with serving(tmp_path, *remotes) as adapters:
        digest = (await adapters.upload()).json()["digest"]
        for remote in remotes:
            for tenant, count in (("", 1), ("tenant-1", 10), ("tenant-2", 100)):
                remote.adapter_counts[digest, tenant] = AdapterCount(digest, tenant, count, count, count, count)
            remote.adapter_counts["another", "tenant-1"] = AdapterCount("another", "tenant-1", 5, 5, 5, 5)
        remotes[0].resident.clear()

        found = (await adapters.get("/v1/adapters/mine")).json()

        assert found["uses"] == {"hits": 22, "waits": 22, "loads": 22, "evictions": 22}
        assert found["replicas"] == {"live": 2, "loaded": 1, "where": ["b"]}
        assert (await adapters.get("/v1/adapters")).json()["data"] == [found]


async def test_a_new_version_is_loaded_before_its_name_stands_for_it(tmp_path: Path) -> None:
    remote = FakeRemote()
    async with serving(tmp_path, remote) as adapters:
        named: list[int] = []
        remote.on_load = lambda _: named.append(adapters.registry.records["tenant-1", "mine"].version)
        remote.ignores_loads = True
        adapters.registry.records["tenant-1", "mine"] = Registered(ADAPTER, 1)

        replaced = await adapters.upload(fill=1)

        assert replaced.json()["version"] == 2, "also where no replica has room for it"
        assert named == [1, 2]
        assert remote.dropped == [ADAPTER.digest]


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


async def test_a_version_that_every_replica_refuses_replaces_none_that_serves(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote(), FakeRemote()) as adapters:
        first = (await adapters.upload(fill=0)).json()
        for remote in adapters.remotes:
            remote.error = "It has DoRA."
        refused = await adapters.upload(fill=1)
        adapters.remotes[0].error = None
        taken = await adapters.upload(fill=2)

        assert refused.status_code == 400
        assert "No replica can load it, so 'mine' stays as it was: It has DoRA." in refused.json()["error"]["message"]
        assert taken.status_code == 201
        assert taken.json()["version"] == 2, "one replica can serve it"
        assert adapters.remotes[0].dropped == [first["digest"]]


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
            "One of 'source' and 'path' says where the adapter is",
        ),
        (
            lambda adapters: adapters.world.client.post(
                "/v1/adapters", json={"name": "x", "path": "y", "source": "folder:y"}
            ),
            "One of 'source' and 'path' says where the adapter is",
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
