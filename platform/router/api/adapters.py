"""/v1/adapters: a tenant brings, lists and deletes its LoRA adapters, while replicas serve.

An adapter is uploaded, or fetched from where the request says; both are an upload here. Every request counts among its
tenant's requests per minute. An upload begins only where the tenant's share of the disk, and the disk, have room for
it. The files are checked against the base model before anything is kept; then the replicas load the adapter, and the
response states how many have. Deleting ends an adapter for new requests at once; those under way keep it. Invariant:
whatever fails, no draft is left, and what was registered under the name before still is.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.adapters.config import MAX_DOWNLOAD_S
from penstock.adapters.peft import FILES, check_folder
from penstock.adapters.registry import NAME_PATTERN, Adapter, Registered
from penstock.base.errors import PenstockError
from penstock.router.api.reads import admit_read
from penstock.router.completions.admission import authenticate, check_model
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.models.adapter_models import AdapterDependencies
from penstock.router.models.served_model import ServedModel
from penstock.router.replicas.adapter_placement import AdapterPlacement
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.upload import boundary_of, receive
from penstock.tenancy.tenants import Tenant
from penstock.wire.adapters import AdapterDeleted, AdapterList, AdapterOut, AdapterReplicas, AdapterUses
from penstock.wire.bodies import decode_adapter_import
from penstock.wire.errors import InvalidRequest, NotFound, Overloaded, RateLimited

ADAPTERS_PATH = "/v1/adapters"
UPLOAD_TIMEOUT_S = MAX_DOWNLOAD_S
MAX_UPLOADS = 4
"""Uploads of all tenants at once in one gateway; one more is refused with Retry-After."""
MAX_TENANT_UPLOADS = 2
"""Uploads of one tenant at once in one gateway; one more is refused with Retry-After."""
SWAP_S = 1.0
"""Longest wait for the replicas to load a new version before its name stands for it, seconds: loading takes up to half
a one, and where all slots are busy it comes with the first request."""
KEEP_S = UPLOAD_TIMEOUT_S + 900.0
"""How long files without an owner stay, beyond the longest request, seconds."""
FORM_BYTES = 2**16
"""Most bytes that a form may hold beside the adapter."""
MIN_FREE_BYTES = 2**30
"""Bytes of the disk that stay free whatever size all uploads under way grow to."""
FULL_RETRY_S = 60.0
"""Retry-After of a full disk, which others may empty at any time, seconds."""

log = logging.getLogger("penstock.adapters")


class AdapterPages:
    """Handlers of /v1/adapters and /v1/adapters/{name}."""

    def __init__(self, deps: GatewayDependencies) -> None:
        self._deps = deps
        self._uploading: list[str] = []
        """Tenant of each upload under way."""

    async def create(self, exchange: Exchange) -> None:
        tenant = await authenticate(self._deps.keys, exchange)
        adapters = self._adapters()
        num_uploads, num_own = len(self._uploading), self._uploading.count(tenant.id)
        if num_uploads >= MAX_UPLOADS or num_own >= MAX_TENANT_UPLOADS:
            raise Overloaded(
                f"{num_uploads} adapters are on their way to this gateway already, {num_own} of them yours.",
                retry_after_s=1.0,
            )
        self._uploading.append(tenant.id)
        try:
            if tenant.limits is not None:
                exchange.limit_headers = await self._deps.admission.charge(
                    tenant.id, tenant.limits, exchange.request_id
                )
            await self._make_room(adapters, tenant.id)
            draft = await asyncio.to_thread(adapters.store.draft)
            try:
                name, out = await self._create(exchange, tenant, adapters, draft)
            finally:
                await asyncio.to_thread(adapters.store.discard, draft)
        finally:
            self._uploading.remove(tenant.id)
        log.info(
            "adapter registered",
            extra={"request_id": exchange.request_id, "tenant": tenant.id, "adapter": name, "digest": out.digest},
        )
        await exchange.answer(msgspec.json.encode(out), 201)
        await self._sweep(adapters)

    async def list(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        adapters = self._adapters()
        found = await adapters.registry.all(tenant.id)
        await exchange.answer(
            msgspec.json.encode(
                AdapterList(
                    data=[_describe_now(adapters, tenant.id, name, registered) for name, registered in found.items()]
                )
            )
        )

    async def retrieve(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        adapters, name = self._adapters(), _name(exchange)
        registered = await adapters.registry.get(tenant.id, name)
        if registered is None:
            raise _not_found(name)
        await exchange.answer(msgspec.json.encode(_describe_now(adapters, tenant.id, name, registered)))

    async def delete(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        adapters, name = self._adapters(), _name(exchange)
        registered = await adapters.registry.remove(tenant.id, name)
        if registered is None:
            raise _not_found(name)
        await self._release(adapters, registered)
        log.info("adapter deleted", extra={"request_id": exchange.request_id, "tenant": tenant.id, "adapter": name})
        await exchange.answer(msgspec.json.encode(AdapterDeleted(id=name)))
        await self._sweep(adapters)

    async def _make_room(self, adapters: AdapterDependencies, tenant: str) -> None:
        """Check that there is room for one more upload, after a sweep where there is none. Raises RateLimited when the
        tenant's files are more than its share, Overloaded when the disk is full.

        The share is a full set of the largest adapters, and one more in each upload under way: what replaces one lies
        beside it until that is swept."""
        config = adapters.config
        share = config.max_per_tenant * config.max_bytes
        copies = 2 if config.sources.has_any else 1  # an archive, and what is in it
        floor = MIN_FREE_BYTES + len(self._uploading) * config.max_bytes * copies
        disk = await asyncio.to_thread(adapters.store.measure_disk_use, tenant)
        if disk.held > share or disk.free < floor:
            await self._sweep(adapters)
            disk = await asyncio.to_thread(adapters.store.measure_disk_use, tenant)
        if disk.held > share:
            raise RateLimited(
                f"Your adapters take {disk.held} bytes of the disk, those that were replaced or deleted lately"
                f" included; more are taken up to {share} bytes (adapters.max_per_tenant times adapters.max_bytes)."
                f" Files of replaced and deleted ones are gone after {self._kept_s:.0f} s.",
                retry_after_s=self._kept_s,
            )
        if disk.free < floor:
            raise Overloaded(
                "There is not enough room for another adapter on this gateway's disk.", retry_after_s=FULL_RETRY_S
            )

    async def _create(
        self, exchange: Exchange, tenant: Tenant, adapters: AdapterDependencies, draft: Path
    ) -> tuple[str, AdapterOut]:
        fields = await self._receive_files(exchange, tenant, adapters, draft)
        name = self._check_name(fields.get("name", ""))
        base = self._find_base(adapters, tenant, fields.get("base_model"))
        requirements = adapters.models.requirements(base)
        checked = await asyncio.to_thread(check_folder, draft, requirements.shapes, requirements.max_rank)
        size_bytes = sum((draft / file).stat().st_size for file in FILES)
        digest = await asyncio.to_thread(adapters.store.put, draft, tenant.id, self._deps.now())
        adapter = Adapter(
            digest, base.name, base.digest, checked.rank, checked.targets, size_bytes, int(self._deps.now())
        )
        pools = adapters.models.pools_for(base.digest)
        before = await adapters.registry.get(tenant.id, name)
        if before is not None:
            # the version before answers until this one is there
            timeout_s = min(SWAP_S, adapters.config.load_timeout_s)
            found = await adapters.placer.load(pools, digest, tenant.id, timeout_s)
            if found.is_refused and before.adapter.digest != digest:
                raise InvalidRequest(f"No replica can load it, so {name!r} stays as it was: {found.error}")
            before = await adapters.registry.get(tenant.id, name)
        registered = await adapters.registry.put(tenant.id, name, adapter)
        if before is not None and before.adapter.digest != digest:
            await self._release(adapters, before)
        placement = await adapters.placer.load(pools, digest, tenant.id, adapters.config.load_timeout_s)
        return name, _describe(name, registered, placement)

    async def _receive_files(
        self, exchange: Exchange, tenant: Tenant, adapters: AdapterDependencies, draft: Path
    ) -> Mapping[str, str]:
        """Write the two files into the draft; returns the name and, where it is given, the base model. What comes from
        elsewhere is fetched only for a name and a base model that it could have."""
        boundary = boundary_of(exchange.header(b"content-type") or b"")
        config = self._deps.config
        if boundary is not None:
            parts = exchange.client.parts(
                exchange.content_length, adapters.config.max_bytes + FORM_BYTES, config.body_timeout_s, UPLOAD_TIMEOUT_S
            )
            return (await receive(boundary, parts, draft)).fields
        body = await exchange.client.body(exchange.content_length, FORM_BYTES, config.body_timeout_s)
        wanted = decode_adapter_import(body)
        exchange.client.drop_body()
        source = wanted.source if wanted.path is None else f"folder:{wanted.path}"
        if source is None or (wanted.path is not None and wanted.source is not None):
            raise InvalidRequest("One of 'source' and 'path' says where the adapter is.", param="source")
        self._check_name(wanted.name)
        self._find_base(adapters, tenant, wanted.base_model)
        with exchange.client.watched(UPLOAD_TIMEOUT_S):
            await adapters.sources.bring(source, wanted.digest, tenant.id, draft)
        return {"name": wanted.name} | ({} if wanted.base_model is None else {"base_model": wanted.base_model})

    def _check_name(self, name: str) -> str:
        """Check the name of a new adapter, and return it. Raises InvalidRequest if it has the wrong form or is a
        model's name."""
        if NAME_PATTERN.fullmatch(name) is None:
            raise InvalidRequest(
                f"'name' must be 1 to 64 letters, digits, dots, dashes or underscores, not {name[:100]!r}.",
                param="name",
            )
        if name in self._deps.models:
            raise InvalidRequest(f"'{name}' is the name of a model; choose another one.", param="name")
        return name

    def _find_base(self, adapters: AdapterDependencies, tenant: Tenant, base_name: str | None) -> ServedModel:
        """The base model of that name, or without a name the only one. Raises Forbidden or InvalidRequest."""
        bases = {name: model for name, model in adapters.models.bases().items() if tenant.may_use(name)}
        if base_name is not None:
            check_model(tenant, base_name)
            if base_name not in bases:
                raise InvalidRequest(
                    f"No model '{base_name[:100]}' is served with adapters; there are: {', '.join(bases) or 'none'}.",
                    param="base_model",
                )
            return bases[base_name]
        if not bases:
            raise InvalidRequest("No model here is served with adapters.", param="base_model")
        if len({model.digest for model in bases.values()}) > 1:
            raise InvalidRequest(
                f"Several models are served with adapters; name the one it was made for: {', '.join(bases)}.",
                param="base_model",
            )
        return next(iter(bases.values()))

    async def _release(self, adapters: AdapterDependencies, registered: Registered) -> None:
        """Have replicas drop what a name no longer stands for, unless another name, perhaps of another tenant, stands
        for the same files."""
        digest = registered.adapter.digest
        await asyncio.to_thread(adapters.store.touch, digest, self._deps.now())
        if digest not in await adapters.registry.owned_digests():
            adapters.placer.drop(adapters.models.pools_for(registered.adapter.model_digest), digest)

    async def _sweep(self, adapters: AdapterDependencies) -> None:
        """Remove files without an owner that are old enough. A failure is only logged; the next sweep tries again."""
        try:
            owned = await adapters.registry.owned_digests()
            removed = await asyncio.to_thread(adapters.store.sweep, owned, self._deps.now() - self._kept_s)
        except (PenstockError, OSError) as error:
            log.warning("adapters not swept", extra={"error": type(error).__name__})
        else:
            if removed:
                log.info("adapters removed", extra={"digests": removed})

    @property
    def _kept_s(self) -> float:
        """How long files without an owner stay, seconds."""
        return self._deps.config.request_timeout_s + KEEP_S

    def _adapters(self) -> AdapterDependencies:
        """Raises NotFound where the gateway serves no adapters."""
        if self._deps.adapters is None:
            raise NotFound("This gateway serves no adapters.")
        return self._deps.adapters


def _name(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{ADAPTERS_PATH}/")


def _not_found(name: str) -> NotFound:
    return NotFound(f"You have no adapter '{name[:100]}'.")


def _describe_now(adapters: AdapterDependencies, tenant: str, name: str, registered: Registered) -> AdapterOut:
    adapter = registered.adapter
    pools = adapters.models.pools_for(adapter.model_digest)
    return _describe(name, registered, adapters.placer.find(pools, adapter.digest, tenant))


def _describe(name: str, registered: Registered, placement: AdapterPlacement) -> AdapterOut:
    adapter, num_loaded = registered.adapter, placement.num_loaded
    return AdapterOut(
        id=name,
        created=adapter.created,
        base_model=adapter.base_model,
        digest=adapter.digest,
        version=registered.version,
        rank=adapter.rank,
        target_modules=adapter.targets,
        size_bytes=adapter.size_bytes,
        state="stored" if not placement.where else "loaded" if num_loaded == placement.live else "partly_loaded",
        replicas=AdapterReplicas(live=placement.live, loaded=num_loaded, where=placement.where),
        uses=AdapterUses(
            hits=placement.num_hits,
            waits=placement.num_waits,
            loads=placement.num_loads,
            evictions=placement.num_evictions,
        ),
        error=placement.error,
    )
