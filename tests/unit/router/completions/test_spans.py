"""The spans of requests over HTTP, as the exporter gets them; those of sequences are in dispatch/test_spans."""

from penstock.base import telemetry as names
from penstock.base.tracing import NOT_TRACED
from penstock.wire.errors import Overloaded
from tests.unit.router.http_fakes import KEY, MODEL, Script, running_gateway
from tests.unit.router.traces import CLIENTS, Traces


async def test_a_request_keeps_the_clients_trace_and_answers_with_its_own_span(traces: Traces) -> None:
    async with running_gateway(Script("Paris."), tracing=traces.tracing) as world:
        world.client.headers["traceparent"] = CLIENTS
        answered = (await world.chat()).headers["traceparent"]
    [request] = traces.spans()
    attributes = dict(request.attributes or {})

    assert request.context is not None
    assert answered == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{request.context.span_id:016x}-01"
    assert (
        attributes[names.MODEL],
        attributes[names.TENANT],
        attributes[names.STATUS],
        attributes[names.OUTPUT_TOKENS],
    ) == (MODEL, "tenant-1", 200, 6)
    assert 0 < attributes[names.TTFT] < 30


async def test_of_two_parents_none_is_right_and_states_are_joined(traces: Traces) -> None:
    async with running_gateway(tracing=traces.tracing) as world:
        for parents in ([CLIENTS], [CLIENTS, CLIENTS.replace("4bf9", "1111")]):
            headers = [
                *(("traceparent", parent) for parent in parents),
                ("tracestate", "a=1"),
                ("tracestate", "b=2"),
            ]
            await world.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
        one, two = (generation.traced for generation in world.dispatcher.generations)
    spans = traces.spans()

    assert (one.tracestate, two.tracestate) == ("a=1,b=2", "")
    assert [span.parent is None for span in spans] == [False, True]


async def test_an_unknown_caller_and_a_gateway_without_tracing_record_nothing(traces: Traces) -> None:
    async with running_gateway(tracing=traces.tracing) as world:
        world.client.headers.update({"traceparent": CLIENTS, "authorization": "Bearer wrong"})
        assert "traceparent" not in (await world.chat()).headers
    async with running_gateway() as world:
        world.client.headers["traceparent"] = CLIENTS
        assert "traceparent" not in (await world.chat()).headers
        assert [one.traced for one in world.dispatcher.generations] == [NOT_TRACED]

    assert traces.spans() == []


async def test_a_failed_request_is_told_by_status_and_class(traces: Traces) -> None:
    refusal = Overloaded("full of secrets", retry_after_s=1.0)
    async with running_gateway(Script(refusal=refusal), tracing=traces.tracing) as world:
        await world.chat()
    [request] = traces.spans()

    attributes = dict(request.attributes or {})
    assert (attributes[names.STATUS], attributes[names.ERROR]) == (503, "Overloaded")
    assert not {"secrets", KEY, "France"} & set(" ".join(map(str, attributes.values())).split())
