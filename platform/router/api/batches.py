"""/v1/batches: a tenant has the lines of a file run, with what capacity others leave.

Every request counts among its tenant's requests per minute. Not the running (`router.batches`): a batch that is created
here is run by whichever gateway takes it. Batches are a tenant's: for any other one they do not exist.
"""

import logging

import msgspec

from penstock.router.api.files import find_batches
from penstock.router.api.listing import page, read_query
from penstock.router.api.reads import admit_read
from penstock.router.batches.batch_record import BatchRecord, new_record
from penstock.router.batches.dependencies import BatchDependencies
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.stay import STAY_PAIR, read_stay
from penstock.tenancy.tenants import Tenant
from penstock.wire.batches import BatchList
from penstock.wire.bodies import decode_batch
from penstock.wire.errors import InvalidRequest, NotFound, Overloaded

BATCHES_PATH = "/v1/batches"
CANCEL = "/cancel"
MAX_BODY_BYTES = 2**16
DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_CANCEL_ATTEMPTS = 16

log = logging.getLogger("penstock.batches")


class BatchPages:
    """Handlers of /v1/batches, /v1/batches/{batch_id} and /v1/batches/{batch_id}/cancel."""

    def __init__(self, deps: GatewayDependencies) -> None:
        self._deps = deps

    async def create(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        body = await exchange.client.body(exchange.content_length, MAX_BODY_BYTES, self._deps.config.body_timeout_s)
        wanted = decode_batch(body)
        file = await parts.files.get(tenant.id, wanted.input_file_id)
        if file is None or file.expires <= self._deps.now():
            raise InvalidRequest(f"You have no file '{wanted.input_file_id}'.", param="input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest("The input file must have the purpose 'batch'.", param="input_file_id")
        batch_id = f"batch_{self._deps.random.getrandbits(96):024x}"
        keep_s = int(parts.config.keep_s)
        num_lines = min(file.num_lines, parts.config.max_lines)
        record = new_record(batch_id, wanted, num_lines, keep_s, self._deps.now(), stays=read_stay(exchange))
        await parts.batches.create(tenant.id, record, parts.config.max_tenant_lines)
        log.info("batch created", extra={"request_id": exchange.request_id, "tenant": tenant.id, "batch": batch_id})
        await self._send(exchange, parts, tenant, record)

    async def list(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        query = read_query(exchange.query, DEFAULT_PAGE, MAX_PAGE)
        records = await parts.batches.all(tenant.id)
        data, has_more = page(records, [record.id for record in records], query)
        counts = await parts.batches.counts(tenant.id, [record.id for record in data])
        await exchange.answer(
            msgspec.json.encode(
                BatchList(
                    data=[record.describe(each) for record, each in zip(data, counts, strict=True)],
                    first_id=data[0].id if data else None,
                    last_id=data[-1].id if data else None,
                    has_more=has_more,
                )
            )
        )

    async def retrieve(self, exchange: Exchange) -> None:
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        await self._send(exchange, parts, tenant, await _find(parts, tenant, _id(exchange)))

    async def cancel(self, exchange: Exchange) -> None:
        """Have no further line run; the results that there are become files within seconds."""
        tenant = await admit_read(self._deps, exchange)
        parts = find_batches(self._deps)
        batch_id = _id(exchange).removesuffix(CANCEL)
        for _ in range(MAX_CANCEL_ATTEMPTS):
            record = await _find(parts, tenant, batch_id)
            if record.status == "cancelling":
                break
            if record.status not in ("validating", "in_progress"):
                raise InvalidRequest(f"The batch is {record.status}: it can't be cancelled any more.")
            cancelling = record.move_to("cancelling", self._deps.now())
            if await parts.batches.replace(tenant.id, record, cancelling):
                record = cancelling
                break
        else:
            raise Overloaded("The batch is changed by others all the time.", retry_after_s=1.0)
        log.info("batch cancelled", extra={"request_id": exchange.request_id, "tenant": tenant.id, "batch": batch_id})
        await self._send(exchange, parts, tenant, record)

    async def _send(self, exchange: Exchange, parts: BatchDependencies, tenant: Tenant, record: BatchRecord) -> None:
        [counts] = await parts.batches.counts(tenant.id, [record.id])
        headers = (STAY_PAIR,) if record.stays else ()
        await exchange.answer(msgspec.json.encode(record.describe(counts)), headers=headers)


async def _find(parts: BatchDependencies, tenant: Tenant, batch_id: str) -> BatchRecord:
    """Raises NotFound."""
    record = await parts.batches.get(tenant.id, batch_id)
    if record is None:
        raise NotFound(f"You have no batch '{batch_id[:100]}'.")
    return record


def _id(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{BATCHES_PATH}/")
