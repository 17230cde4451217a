"""A tenant's adapters as models of the API: a name to the base model, the adapter's digest, and the pools that serve
it.

Not the files (`penstock.adapters.store`) and not the HTTP surface (`api.adapters`). Invariant: a name is looked up
among the requesting tenant's own only, so that another tenant's does not exist for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.adapters.config import AdaptersConfig
from penstock.adapters.registry import Registered, Registry
from penstock.adapters.sources.bring import Sources
from penstock.adapters.store import AdapterStore
from penstock.router.config import AdapterBase, PoolSpec
from penstock.router.models.served_model import ServedModel
from penstock.router.replicas.adapter_placement import AdapterPlacer


class AdapterModels:
    """The models that tenants' adapters make of the served ones."""

    def __init__(self, registry: Registry, models: Mapping[str, ServedModel], pools: Mapping[str, PoolSpec]) -> None:
        """models: by served name. pools: by name."""
        self._registry = registry
        self._models = models
        self._pools = pools

    async def find(self, tenant: str, name: str) -> ServedModel | None:
        """The model that `name`, or `base:name`, means for this tenant. Raises Overloaded when that can't be looked
        up."""
        base, _, rest = name.rpartition(":")
        registered = await self._registry.get(tenant, rest)
        if registered is None:
            return None
        model = self._find_base(registered, base)
        return None if model is None else self._with_adapter(model, registered, name, tenant)

    async def all(self, tenant: str) -> list[ServedModel]:
        """The tenant's adapters whose base model is served. Raises Overloaded when they can't be looked up."""
        found = []
        for name, registered in (await self._registry.all(tenant)).items():
            model = self._find_base(registered, "")
            if model is not None and name not in self._models:
                found.append(self._with_adapter(model, registered, name, tenant))
        return found

    def bases(self) -> dict[str, ServedModel]:
        """The models that adapters can be made for, by served name."""
        return {name: model for name, model in self._models.items() if self.pools_of(model)}

    def requirements(self, model: ServedModel) -> AdapterBase:
        """The shapes and the largest rank that all pools of a base model can take."""
        first, *others = (base for pool in self.pools_of(model) if (base := self._pools[pool].adapters) is not None)
        return AdapterBase(shapes=first.shapes, max_rank=min(base.max_rank for base in (first, *others)))

    def pools_of(self, model: ServedModel) -> tuple[str, ...]:
        """The model's pools with slots for adapters. The pools of further models under the same name are none of
        them."""
        return tuple(pool for pool in model.pools if self._pools[pool].adapters is not None)

    def pools_for(self, model_digest: str) -> tuple[str, ...]:
        """All pools that serve adapters of a checkpoint, whatever name it has there."""
        return tuple(
            dict.fromkeys(
                pool for model in self._models.values() if model.digest == model_digest for pool in self.pools_of(model)
            )
        )

    def _find_base(self, registered: Registered, base_name: str) -> ServedModel | None:
        """The served model with the checkpoint that the adapter was made for. base_name: a served name, or empty for
        any. Returns None if no model (of that name) has that checkpoint."""
        names: Iterable[str] = (base_name,) if base_name else (registered.adapter.base_model, *self._models)
        for name in names:
            model = self._models.get(name)
            if model is not None and model.digest == registered.adapter.model_digest and self.pools_of(model):
                return model
        return None

    def _with_adapter(self, base: ServedModel, registered: Registered, name: str, tenant: str) -> ServedModel:
        pools = self.pools_of(base)
        routes = [
            route._replace(pools=tuple(pool for pool in route.pools if pool in pools))
            for route in base.routes
            if route.provider is None
        ]
        return replace(
            base,
            name=name,
            pools=pools,
            routes=tuple(route for route in routes if route.pools),
            others=(),
            created=registered.adapter.created,
            owned_by=tenant,
            base=base.name,
            adapter=registered.adapter.digest,
        )


@dataclass(frozen=True)
class AdapterDependencies:
    """The collaborators of a gateway that serves adapters."""

    config: AdaptersConfig
    registry: Registry
    store: AdapterStore
    models: AdapterModels
    placer: AdapterPlacer
    sources: Sources
