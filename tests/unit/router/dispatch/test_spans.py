"""The spans of sequences over fake replicas, as the exporter gets them; those of requests are in
completions/test_spans."""

import asyncio
import dataclasses
from typing import Any

import pytest

from penstock.base import telemetry as names
from penstock.router.config import GatewayConfig
from penstock.router.dispatch.mailbox import merge_deltas
from penstock.router.dispatch.spans import StreamTrace, make_stream_trace
from penstock.router.routing.request import Generation, Receipt, TextDelta
from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Delta, Finish, Timing
from tests.unit.router.fleet_fakes import Cluster, FakeMember, generation
from tests.unit.router.traces import CLIENTS, Traces

A, B = FakeMember("a"), FakeMember("b")
PROMPT = list(range(10, 40))
FIRST, LAST = Timing(0.25, 100.0, 101.0, 101.0), Timing(0.25, 100.0, 101.0, 104.0, num_preemptions=2)


def named(traces: Traces) -> list[tuple[str, dict[str, Any]]]:
    return [(span.name, dict(span.attributes or {})) for span in traces.spans()]


def traced(traces: Traces, **changes: Any) -> Generation:
    return dataclasses.replace(generation(PROMPT, **changes), traced=traces.tracing.begin(CLIENTS, 0.0))


def only(spans: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [attributes for found, attributes in spans if found == name]


async def test_an_attempt_is_a_wait_a_route_a_prefill_and_a_decode(traces: Traces) -> None:
    async with Cluster(A) as cluster:
        stream = await cluster.dispatcher.start(traced(traces))
        cluster.replicas["a"].send(Delta(1, [5], num_cached_tokens=8, timing=FIRST))
        await stream.next()
        cluster.replicas["a"].send(Delta(1, [6, 7], finish=Finish.STOP, timing=LAST))
        await stream.next()
        cluster.replicas["a"].running.clear()
        stream.close()
    spans = named(traces)
    place = {names.SEQUENCE: "r", names.ATTEMPT: 1}

    assert [name for name, _ in spans] == ["route", "queue", "prefill", "decode"]
    assert only(spans, "queue") == [place]
    assert only(spans, "prefill") == [
        place | {names.REPLICA: "a", names.INPUT_TOKENS: len(PROMPT), names.CACHED_TOKENS: 8, names.ENGINE_WAIT: 0.25}
    ]
    assert only(spans, "decode") == [
        place | {names.REPLICA: "a", names.OUTPUT_TOKENS: 3, names.PREEMPTIONS: 2, names.FINISH: "stop"}
    ]
    [route] = only(spans, "route")
    assert (route[names.POOL], route[names.REPLICA], route[names.TIER], route[names.REASON]) == (
        "pool",
        "a",
        "edge",
        "only_replica",
    )


def test_the_engines_times_are_told_as_they_are(traces: Traces) -> None:
    trace = traces.tracing.begin(CLIENTS, 0.0).trace
    assert trace is not None
    subject = StreamTrace(trace, generation(PROMPT), Receipt("r"))

    subject.record_delta(Delta(1, [5], timing=FIRST))
    subject.record_delta(Delta(1, [6], finish=Finish.LENGTH, timing=LAST))
    subject.end_attempt(30, 2, is_text=False)
    prefill, decode = traces.spans()

    assert (prefill.start_time, prefill.end_time) == (100_000_000_000, 101_000_000_000)
    assert (decode.start_time, decode.end_time) == (101_000_000_000, 104_000_000_000)


async def test_an_answer_that_goes_on_elsewhere_is_two_attempts(traces: Traces) -> None:
    async with Cluster(A, B) as cluster:
        stream = await cluster.dispatcher.start(traced(traces))
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
    spans = named(traces)

    assert [attributes[names.ATTEMPT] for attributes in only(spans, "route")] == [1, 2]
    assert [(a[names.ATTEMPT], a[names.OUTPUT_TOKENS], a[names.FINISH]) for a in only(spans, "decode")] == [
        (1, 2, "abort"),
        (2, 3, "stop"),
    ]
    assert len({a[names.REPLICA] for a in only(spans, "prefill")}) == 2


async def test_a_wait_in_vain_is_told_by_its_error(traces: Traces) -> None:
    async with Cluster(A, max_inflight=0, config=GatewayConfig(queue_timeout_s=0.01)) as cluster:
        with pytest.raises(Overloaded):
            await cluster.dispatcher.start(traced(traces))

    assert named(traces) == [("queue", {names.SEQUENCE: "r", names.ATTEMPT: 1, names.ERROR: "Overloaded"})]


async def test_an_answer_that_is_given_up_has_run_until_now(traces: Traces) -> None:
    async with Cluster(A) as cluster:
        stream = await cluster.dispatcher.start(traced(traces))
        cluster.replicas["a"].send(Delta(1, [5, 6], num_cached_tokens=0, timing=FIRST))
        await stream.next()
        stream.close()
        stream.close()
    spans = {span.name: span for span in traces.spans()}

    assert spans["decode"].end_time is not None
    assert spans["decode"].end_time > LAST.last_token_s * 1e9
    assert dict(spans["decode"].attributes or {})[names.FINISH] == "abort"
    assert len(spans) == 4


async def test_a_replica_is_told_of_a_trace_only_where_there_is_one(traces: Traces) -> None:
    async with Cluster(A) as cluster:
        with_trace = traced(traces)
        streams = [await cluster.dispatcher.start(one) for one in (with_trace, generation(PROMPT))]
        for stream in streams:
            stream.close()

        assert [submit.traceparent for submit in cluster.replicas["a"].submits] == [with_trace.traced.traceparent, None]
        assert streams[1].state.trace is None


def test_a_providers_answer_is_one_span_and_its_refusal_too(traces: Traces) -> None:
    receipt = Receipt("r", pool="far", tier="cloud")
    subject = make_stream_trace(traced(traces), receipt)
    assert subject is not None

    subject.record_route(1.0, 1.1)
    subject.end_attempt(30, 0, is_text=True, error=ReplicaLost("the prompt was: secret"))
    receipt.attempts = 2
    subject.record_route(2.0, 2.1)
    subject.record_delta(TextDelta(1, [], text="secret", num_tokens=4))
    subject.record_delta(TextDelta(1, [], finish=Finish.STOP, num_tokens=-1))
    subject.end_attempt(30, 3, is_text=True)
    subject.end_attempt(30, 3, is_text=True)
    found = only(named(traces), "provider")

    place = {names.SEQUENCE: "r", names.POOL: "far", names.TIER: "cloud"}
    assert found == [
        place | {names.ATTEMPT: 1, names.OUTPUT_TOKENS: 0, names.ERROR: "ReplicaLost"},
        place | {names.ATTEMPT: 2, names.OUTPUT_TOKENS: 3, names.FINISH: "stop"},
    ]


def test_deltas_that_are_read_as_one_keep_the_latest_times() -> None:
    deltas = [Delta(1, [5], num_cached_tokens=0, timing=FIRST), Delta(1, [6])]

    assert merge_deltas(deltas).timing == FIRST
    assert merge_deltas([*deltas, Delta(1, [7], finish=Finish.STOP, timing=LAST)]).timing == LAST
