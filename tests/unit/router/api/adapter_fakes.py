"""/v1/adapters over HTTP, with a registry in a dictionary, a real store, and replicas that do what the test says."""

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from penstock.adapters.config import AdaptersConfig
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.registry import Adapter, Registered, Registry
from penstock.adapters.sources.bring import NO_SECRETS, Sources, SourceSecrets
from penstock.adapters.sources.connection import Resolve
from penstock.adapters.store import AdapterStore
from penstock.router.config import AdapterBase, PoolSpec, ProviderConfig
from penstock.router.models.adapter_models import AdapterDependencies, AdapterModels
from penstock.router.models.served_model import ServedModel
from penstock.router.replicas.adapter_placement import AdapterPlacer
from penstock.router.routing.request import Route
from penstock.tenancy.tenants import Settings
from penstock.wire.frames import AdapterCount, Load, StepCosts
from tests.unit.adapters.files import BASE, write
from tests.unit.router.fleet_fakes import FakeMember
from tests.unit.router.http_fakes import CONTEXT, MODEL, TOKENIZER, World, running_gateway

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
    member: FakeMember = field(default_factory=lambda: FakeMember("a"))
    adapter_counts: dict[tuple[str, str], AdapterCount] = field(default_factory=dict)
    on_load: Callable[[str], None] = field(default=lambda _: None)

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

    def load_adapter(self, digest: str, tenant: str = "") -> None:
        self.on_load(digest)
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
    secrets: SourceSecrets = NO_SECRETS,
    resolve: Resolve | None = None,
    **changes: Any,
) -> AsyncIterator[Adapters]:
    """pool-a serves adapters, pool-b does not. changes: of the configuration."""
    registry, store = FakeRegistry(), AdapterStore(tmp_path / "store")
    by_name = {model.name: model for model in models}
    adapter_models = AdapterModels(
        cast(Registry, registry), by_name, {"pool-a": pool("pool-a"), "pool-b": pool("pool-b", max_rank=None)}
    )

    def ready(pools: Iterable[str]) -> Iterable[FakeRemote]:
        wanted = tuple(pools)
        assert wanted in ((), ("pool-a",))
        return remotes if wanted else ()

    config = AdaptersConfig(load_timeout_s=0.05, **changes)
    deps = AdapterDependencies(
        config,
        cast(Registry, registry),
        store,
        adapter_models,
        AdapterPlacer(ready),
        Sources(config, secrets, time.time, resolve),
    )
    async with running_gateway(
        models=by_name, adapters=deps, settings=settings, providers=(PROVIDER,), num_gateways=1
    ) as world:
        yield Adapters(world, registry, store, list(remotes), tmp_path / "files")
