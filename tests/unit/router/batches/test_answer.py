"""Lines of batches, answered by the endpoint that answers requests: what their tenants' budgets are settled with."""

import asyncio
import dataclasses
from random import Random
from typing import Any

import msgspec
import pytest

from penstock.router.batches.answer import TriedUsage, answer
from penstock.router.completions.admission import Admission
from penstock.router.completions.endpoint import CompletionsEndpoint
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.tenancy.tariffs import TariffRule, Tariffs
from penstock.tenancy.tenants import Limits, Tenant
from penstock.tenancy.window import Verdict
from tests.unit.router.http_fakes import MODEL, running_gateway


class Admitting:
    """A limiter that admits everything, and keeps what requests were charged."""

    def __init__(self) -> None:
        self.settled_nano: list[int] = []

    async def reserve(self, *asked: object) -> Verdict:
        return Verdict(True)

    def settle(self, tenant_id: str, request_id: str, used_tokens: int, charged_nano: int = 0) -> None:
        self.settled_nano.append(charged_nano)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_the_budget_is_settled_with_the_charge_that_the_lines_usage_has(is_given_up: bool) -> None:
    limiter: Any = Admitting()
    unused: Any = None
    usage = TriedUsage(lambda: is_given_up)
    body = msgspec.json.encode({"model": MODEL, "prompt": "Hi", "max_tokens": 4})
    tenant = Tenant("tenant-1", b"salt", limits=Limits(budget=1.0))
    async with running_gateway() as world:
        tariffs = Tariffs([TariffRule(input=1.0, output=4.0)])
        admission = Admission(limiter, unused, world.metrics, Random(1), tariffs=tariffs)
        deps = dataclasses.replace(world.deps, admission=admission)
        endpoint = CompletionsEndpoint(deps, RequestMetrics(world.metrics, deps.models), Receipts(1))
        clock = asyncio.get_running_loop().time
        answered = await answer(endpoint.serve_line, tenant, "/v1/completions", body, "r", clock, usage)

    assert answered.status == 200
    taken = usage.take()
    assert taken is not None
    assert taken.used.completion_tokens > 0
    assert limiter.settled_nano == [taken.used.charge_nano]
    assert (taken.used.charge_nano == 0) == is_given_up
