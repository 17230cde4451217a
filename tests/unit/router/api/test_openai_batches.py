"""The `openai` package, unmodified, has a batch run by a gateway over a real socket, with a real Redis."""

import asyncio
import dataclasses
from pathlib import Path
from random import Random

import msgspec
import openai

from bench.support.platform_process import read_metric
from penstock.router.batches.capacity import Capacity
from penstock.router.batches.run import LineRunner
from penstock.router.batches.runner import BatchRunner
from penstock.router.completions.endpoint import CompletionsEndpoint
from penstock.router.completions.receipts import Receipts
from penstock.router.completions.request_metrics import RequestMetrics
from penstock.router.models.served_model import ServedModel
from penstock.tenancy.usage import day_name, read_usage
from penstock.wire.batches import ENDED
from tests.unit.router.api.test_files import keeping
from tests.unit.router.batches.batch_fakes import eventually
from tests.unit.router.http_fakes import CONTEXT, KEY, MODEL, TOKENIZER, Script, World, listening


def runner_of(world: World) -> BatchRunner:
    """What runs the batches of a gateway, as its composition root builds it."""
    deps = world.deps
    assert deps.batches is not None
    lines = CompletionsEndpoint(
        dataclasses.replace(deps, tracing=None), RequestMetrics(deps.metrics, deps.models), Receipts(1)
    )
    return BatchRunner(
        LineRunner(
            parts=deps.batches,
            serve=lines.serve_line,
            find_tenant=deps.keys.tenant_by_id,
            capacity=Capacity(4, lambda: True),
            max_line_bytes=2**20,
            count=lambda outcome: deps.metrics.batch_lines.labels(outcome).inc(),
            charge=lambda tenant, usage: deps.admission.add_usage(tenant, *usage),
            note_charge=lambda usage: deps.admission.count_charge(usage.model, usage.used.charge_nano),
            now=deps.now,
            clock=deps.clock,
            random=Random(1),
        ),
        "gateway-1",
    )


async def until_ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch_id)).status in ENDED

    await eventually(has_ended)
    return await client.batches.retrieve(batch_id)


async def test_a_batch_of_chats_from_upload_to_results(batch_redis: str, folder: Path) -> None:
    async with (
        keeping(batch_redis, folder) as (world, parts),
        listening(world.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Capital of France?"}], "max_tokens": 8}
        rows = [
            {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": chat}
            for number in range(10)
        ]
        rows[3]["body"] = chat | {"max_token": 8}
        text = b"\n".join(map(msgspec.json.encode, rows))
        today = day_name(int(world.deps.now()) // 86400)
        before = await read_usage(parts.files._client, "tenant-1", [today])

        file = await client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a test"}
        )
        running = asyncio.create_task(runner_of(world).run())
        try:
            found = await until_ended(client, batch.id)
        finally:
            running.cancel()
            await asyncio.wait([running])

        assert found.status == "completed"
        assert found.request_counts is not None
        assert (found.request_counts.total, found.request_counts.completed) == (10, 9)
        output = [
            msgspec.json.decode(row) for row in (await client.files.content(found.output_file_id or "")).iter_lines()
        ]
        assert [row["custom_id"] for row in output] == [f"row-{number}" for number in range(10) if number != 3]
        for row in output:
            answer = openai.types.chat.ChatCompletion.model_validate(row["response"]["body"])
            assert answer.choices[0].message.content == "Paris."
            assert answer.id == f"chatcmpl-{row['response']['request_id']}"
        [error] = [
            msgspec.json.decode(row) for row in (await client.files.content(found.error_file_id or "")).iter_lines()
        ]
        assert error["response"]["status_code"] == 400
        assert "max_tokens" in error["response"]["body"]["error"]["message"]
        assert found.usage is not None
        num_tokens = len("Paris.")
        assert found.usage.output_tokens == 9 * num_tokens
        [row] = await read_usage(parts.files._client, "tenant-1", [today])
        requests = sum(each.used.requests for each in before)
        assert row.used.requests - requests == 9
        assert {generation.share.service_class for generation in world.dispatcher.generations} == {"batch"}
        assert {generation.account for generation in world.dispatcher.generations} == {"tenant-1/batch"}
        assert world.metrics.ttft_s.labels(MODEL)._sum.get() == 0, "nobody waited for them"
        page = world.metrics.render().decode()
        assert read_metric(page, "penstock_batch_lines_total", outcome="completed") == 9
        assert read_metric(page, "penstock_batch_lines_total", outcome="failed") == 1
        listed = [each.id async for each in client.files.list(purpose="batch_output")]
        assert {found.output_file_id, found.error_file_id} == set(listed)
        assert [each.id async for each in client.batches.list()] == [batch.id]
        await client.files.delete(file.id)


async def test_a_batch_is_cancelled_by_the_client(batch_redis: str, folder: Path) -> None:
    async with (
        keeping(batch_redis, folder) as (world, _),
        listening(world.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        world.dispatcher.script.hold_after = 0
        row = {"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
        file = await client.files.create(file=("in.jsonl", msgspec.json.encode(row)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        running = asyncio.create_task(runner_of(world).run())
        try:
            await world.dispatcher.until(lambda: world.dispatcher.num_open == 1)
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            found = await until_ended(client, batch.id)
            assert found.status == "cancelled"
            assert world.dispatcher.num_open == 0
            error = (await client.files.content(found.error_file_id or "")).json()
            assert error["error"]["code"] == "batch_cancelled"
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_lines_may_have_tools_and_schemas_as_other_requests_may(batch_redis: str, folder: Path) -> None:
    roomy = ServedModel(MODEL, ("pool-a",), TOKENIZER, lambda: 8 * CONTEXT, "0123456789abcdef")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    fields: dict[str, dict[str, object]] = {
        "called": {"tools": [tool], "tool_choice": "required"},
        "schema": {"response_format": {"type": "json_object"}},
        "refused": {"guided_regex": "("},
    }
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 80}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": chat | more}
        for name, more in fields.items()
    ]
    async with (
        keeping(batch_redis, folder, model=roomy) as (world, _),
        listening(world.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        world.dispatcher.script = Script('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
        file = await client.files.create(file=("in.jsonl", b"\n".join(map(msgspec.json.encode, rows))), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        running = asyncio.create_task(runner_of(world).run())
        try:
            found = await until_ended(client, batch.id)
        finally:
            running.cancel()
            await asyncio.wait([running])

        output = (await client.files.content(found.output_file_id or "")).text.splitlines()
        called, schema = [msgspec.json.decode(row)["response"]["body"]["choices"][0] for row in output]
        assert called["finish_reason"] == "tool_calls"
        assert called["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert schema["finish_reason"] == "stop"
        kinds = [generation.constraint and generation.constraint.kind for generation in world.dispatcher.generations]
        assert sorted(map(str, kinds)) == ["grammar", "json_schema"]
        error = (await client.files.content(found.error_file_id or "")).json()
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["param"] == "guided_regex"
