"""What traces say, seen at the exporter: of requests over HTTP, and of streams over fake replicas."""

import asyncio
import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.base import telemetry as names
from penstock.base.tracing import NOT_TRACED, Started, Tracing
from penstock.router.config import GatewayConfig
from penstock.router.dispatch.spans import StreamTrace, of_stream
from penstock.router.dispatch.stream import merged
from penstock.router.routing.request import Generation, Receipt, TextDelta
from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish, Timing
from tests.unit.router.fleet_fakes import Cluster, FakeMember, generation
from tests.unit.router.http_fakes import KEY, MODEL, Script, gateway, run

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))
CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FIRST, LAST = Timing(0.25, 100.0, 101.0, 101.0), Timing(0.25, 100.0, 101.0, 104.0, num_preemptions=2)


class Traces:
    """A tracing whose spans can be read."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, 1.0, "gateway-1", lambda outcome, count: None, Random(0))

    def spans(self) -> list[ReadableSpan]:
        """In the order in which they ended; nothing is recorded any more."""
        self.tracing.close()
        return list(self._exporter.get_finished_spans())

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(span.name, dict(span.attributes or {})) for span in self.spans()]

    def generation(self, **changes: Any) -> Generation:
        return dataclasses.replace(generation(PROMPT, **changes), traced=self.tracing.begin(CLIENTS, 0.0))


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.tracing.close()


def only(told: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [attributes for found, attributes in told if found == name]


# --- streams


def test_an_attempt_is_a_wait_a_route_a_prefill_and_a_decode(traces: Traces) -> None:
    async def main() -> None:
        async with Cluster(A) as cluster:
            stream = await cluster.dispatcher.start(traces.generation())
            cluster.replicas["a"].send(Delta(1, [5], num_cached_tokens=8, timing=FIRST))
            await stream.next()
            cluster.replicas["a"].send(Delta(1, [6, 7], finish=Finish.STOP, timing=LAST))
            await stream.next()
            cluster.replicas["a"].running.clear()
            stream.close()

    run(main)
    told = traces.told()
    place = {names.SEQUENCE: "r", names.ATTEMPT: 1}

    assert [name for name, _ in told] == ["route", "queue", "prefill", "decode"]
    assert only(told, "queue") == [place]
    assert only(told, "prefill") == [
        place | {names.REPLICA: "a", names.INPUT_TOKENS: len(PROMPT), names.CACHED_TOKENS: 8, names.ENGINE_WAIT: 0.25}
    ]
    assert only(told, "decode") == [
        place | {names.REPLICA: "a", names.OUTPUT_TOKENS: 3, names.PREEMPTIONS: 2, names.FINISH: "stop"}
    ]
    [route] = only(told, "route")
    assert (route[names.POOL], route[names.REPLICA], route[names.TIER], route[names.REASON]) == (
        "pool",
        "a",
        "edge",
        "only_replica",
    )


def test_the_engines_times_are_told_as_they_are(traces: Traces) -> None:
    subject = StreamTrace(traced := traces.tracing.begin(CLIENTS, 0.0).trace, generation(PROMPT), Receipt("r"))  # type: ignore[arg-type]
    assert traced is not None

    subject.told(Delta(1, [5], timing=FIRST))
    subject.told(Delta(1, [6], finish=Finish.LENGTH, timing=LAST))
    subject.over(30, 2, is_text=False)
    prefill, decode = traces.spans()

    assert (prefill.start_time, prefill.end_time) == (100_000_000_000, 101_000_000_000)
    assert (decode.start_time, decode.end_time) == (101_000_000_000, 104_000_000_000)


def test_an_answer_that_goes_on_elsewhere_is_two_attempts(traces: Traces) -> None:
    async def main() -> None:
        async with Cluster(A, B) as cluster:
            stream = await cluster.dispatcher.start(traces.generation())
            lost = cluster.replicas[stream.receipt.replica]
            lost.send(Delta(1, [5, 6], num_cached_tokens=0, timing=FIRST))
            await stream.next()
            lost.die()
            reading = asyncio.ensure_future(stream.next())
            while not any(replica.running for replica in cluster.replicas.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            other = cluster.replicas[stream.receipt.replica]
            other.send(Delta(1, [7, 8, 9], finish=Finish.STOP, num_cached_tokens=0, timing=LAST))
            other.running.clear()
            await reading
            stream.close()

    run(main)
    told = traces.told()

    assert [attributes[names.ATTEMPT] for attributes in only(told, "route")] == [1, 2]
    assert [(a[names.ATTEMPT], a[names.OUTPUT_TOKENS], a[names.FINISH]) for a in only(told, "decode")] == [
        (1, 2, "abort"),
        (2, 3, "stop"),
    ]
    assert len({a[names.REPLICA] for a in only(told, "prefill")}) == 2


def test_a_wait_in_vain_is_told_by_its_error(traces: Traces) -> None:
    async def main() -> None:
        async with Cluster(A, max_inflight=0, config=GatewayConfig(queue_timeout_s=0.01)) as cluster:
            with pytest.raises(Overloaded):
                await cluster.dispatcher.start(traces.generation())

    run(main)

    assert traces.told() == [("queue", {names.SEQUENCE: "r", names.ATTEMPT: 1, names.ERROR: "Overloaded"})]


def test_an_answer_that_is_given_up_has_run_until_now(traces: Traces) -> None:
    async def main() -> None:
        async with Cluster(A) as cluster:
            stream = await cluster.dispatcher.start(traces.generation())
            cluster.replicas["a"].send(Delta(1, [5, 6], num_cached_tokens=0, timing=FIRST))
            await stream.next()
            stream.close()
            stream.close()

    run(main)
    spans = {span.name: span for span in traces.spans()}

    assert spans["decode"].end_time is not None
    assert spans["decode"].end_time > LAST.last_token_s * 1e9
    assert dict(spans["decode"].attributes or {})[names.FINISH] == "abort"
    assert len(spans) == 4


def test_a_replica_is_told_of_a_trace_only_where_there_is_one(traces: Traces) -> None:
    async def main() -> None:
        async with Cluster(A) as cluster:
            traced = traces.generation()
            streams = [await cluster.dispatcher.start(one) for one in (traced, generation(PROMPT))]
            for stream in streams:
                stream.close()

            assert [submit.traceparent for submit in cluster.replicas["a"].submits] == [traced.traced.traceparent, None]
            assert streams[1].trace is None

    run(main)


def test_a_providers_answer_is_one_span_and_its_refusal_too(traces: Traces) -> None:
    receipt = Receipt("r", pool="far", tier="cloud")
    subject = of_stream(traces.generation(), receipt)
    assert subject is not None

    subject.routed(1.0, 1.1)
    subject.over(30, 0, is_text=True, error=ReplicaLost("the prompt was: secret"))
    receipt.attempts = 2
    subject.routed(2.0, 2.1)
    subject.told(TextDelta(1, [], text="secret", num_tokens=4))
    subject.told(TextDelta(1, [], finish=Finish.STOP, num_tokens=-1))
    subject.over(30, 0, is_text=True)
    subject.over(30, 0, is_text=True)
    told = only(traces.told(), "provider")

    place = {names.SEQUENCE: "r", names.POOL: "far", names.TIER: "cloud"}
    assert told == [
        place | {names.ATTEMPT: 1, names.OUTPUT_TOKENS: 0, names.ERROR: "ReplicaLost"},
        place | {names.ATTEMPT: 2, names.OUTPUT_TOKENS: 3, names.FINISH: "stop"},
    ]


def test_deltas_that_are_read_as_one_keep_the_latest_times() -> None:
    deltas = [Delta(1, [5], num_cached_tokens=0, timing=FIRST), Delta(1, [6])]

    assert merged(deltas).timing == FIRST
    assert merged([*deltas, Delta(1, [7], finish=Finish.STOP, timing=LAST)]).timing == LAST


# --- requests


def test_a_request_keeps_the_clients_trace_and_answers_with_its_own_span(traces: Traces) -> None:
    async def main() -> str:
        async with gateway(Script("Paris."), tracing=traces.tracing) as world:
            world.client.headers["traceparent"] = CLIENTS
            return (await world.chat()).headers["traceparent"]

    answered = run(main)
    [request] = traces.spans()
    said = dict(request.attributes or {})

    assert request.context is not None
    assert answered == f"00-4bf92f3577b34da6a3ce929d0e0e4736-{request.context.span_id:016x}-01"
    assert (said[names.MODEL], said[names.TENANT], said[names.STATUS], said[names.OUTPUT_TOKENS]) == (
        MODEL,
        "tenant-1",
        200,
        6,
    )
    assert 0 < said[names.TTFT] < 30


def test_of_two_parents_none_is_right_and_states_are_joined(traces: Traces) -> None:
    async def main() -> list[Started]:
        async with gateway(tracing=traces.tracing) as world:
            for parents in ([CLIENTS], [CLIENTS, CLIENTS.replace("4bf9", "1111")]):
                headers = [
                    *(("traceparent", parent) for parent in parents),
                    ("tracestate", "a=1"),
                    ("tracestate", "b=2"),
                ]
                await world.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
            return [one.traced for one in world.dispatcher.generations]

    one, two = run(main)
    spans = traces.spans()

    assert (one.tracestate, two.tracestate) == ("a=1,b=2", "")
    assert [span.parent is None for span in spans] == [False, True]


def test_an_unknown_caller_and_a_gateway_without_tracing_record_nothing(traces: Traces) -> None:
    async def main() -> None:
        async with gateway(tracing=traces.tracing) as world:
            world.client.headers.update({"traceparent": CLIENTS, "authorization": "Bearer wrong"})
            assert "traceparent" not in (await world.chat()).headers
        async with gateway() as world:
            world.client.headers["traceparent"] = CLIENTS
            assert "traceparent" not in (await world.chat()).headers
            assert [one.traced for one in world.dispatcher.generations] == [NOT_TRACED]

    run(main)

    assert traces.spans() == []


def test_a_failed_request_is_told_by_status_and_class(traces: Traces) -> None:
    async def main() -> None:
        async with gateway(
            Script(refusal=Overloaded("full of secrets", retry_after_s=1.0)), tracing=traces.tracing
        ) as world:
            await world.chat()

    run(main)
    [request] = traces.spans()

    said = dict(request.attributes or {})
    assert (said[names.STATUS], said[names.ERROR]) == (503, "Overloaded")
    assert not {"secrets", KEY, "France"} & set(" ".join(map(str, said.values())).split())
