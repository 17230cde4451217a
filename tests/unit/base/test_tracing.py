"""Traces, recorded by the real SDK and taken off at the exporter."""

import threading
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.base import tracing as tracing_module
from penstock.base.telemetry import DECODE, PREFILL, PROVIDER, REQUEST, REQUEST_ID, SEQUENCE, TelemetryConfig
from penstock.base.tracing import BATCH_SPANS, MAX_HELD_SPANS, NOT_TRACED, Tracing, open_tracing

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SAMPLED = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
NOT_SAMPLED = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-00"


class Collected(SpanExporter):
    """Holds what it is given; an export waits until `open` is set."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.spans: list[Any] = []
        self.result = result
        self.open = threading.Event()
        self.has_begun = threading.Event()
        self.is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        assert self.open.wait(30)
        self.spans += spans
        return self.result

    def shutdown(self) -> None:
        self.is_shut = True
        self.open.set()


def tracing(
    exporter: Collected, sample_ratio: float = 1.0, count: Any = lambda outcome, count: None, now: float = 1000.0
) -> Tracing:
    return Tracing(exporter, sample_ratio, "gateway-1", count, Random(1), lambda: now, lambda: 100.0)


def closed(subject: Tracing, exporter: Collected) -> dict[str, Any]:
    """The spans, by name."""
    exporter.open.set()
    subject.close()
    return {span.name: span for span in exporter.spans}


def test_spans_are_children_of_the_requests_span_under_the_clients_trace_id() -> None:
    exporter = Collected()
    subject = tracing(exporter)

    trace = subject.begin(SAMPLED, began_s=99.5).trace
    assert trace is not None
    trace.note({REQUEST_ID: "r1"})
    trace.add(PREFILL, 999.75, 999.875, {SEQUENCE: "r1"})
    trace.end()
    spans = closed(subject, exporter)

    request, prefill = spans[REQUEST], spans[PREFILL]
    assert (request.context.trace_id, request.parent.span_id) == (TRACE_ID, SPAN_ID)
    assert (prefill.context.trace_id, prefill.parent.span_id) == (TRACE_ID, request.context.span_id)
    assert (request.start_time, request.end_time) == (999_500_000_000, 1_000_000_000_000)
    assert (prefill.start_time, prefill.end_time) == (999_750_000_000, 999_875_000_000)
    assert trace.traceparent == f"00-{TRACE_ID:032x}-{request.context.span_id:016x}-01"
    assert (dict(request.attributes), dict(prefill.attributes)) == ({REQUEST_ID: "r1"}, {SEQUENCE: "r1"})
    assert request.resource.attributes["service.instance.id"] == "gateway-1"


def test_a_caller_that_does_not_sample_is_not_recorded_but_its_context_goes_on() -> None:
    exporter = Collected()
    subject = tracing(exporter, sample_ratio=1.0)

    started = subject.begin(NOT_SAMPLED, 99.5)

    assert (started.trace, started.traceparent) == (None, NOT_SAMPLED)
    assert started.headers == {"traceparent": NOT_SAMPLED}
    assert closed(subject, exporter) == {}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-1-2-01",
        SAMPLED.replace("4bf9", "zzzz"),
        SAMPLED.upper(),
        f"00-{0:032x}-{SPAN_ID:016x}-01",
        f"00-{TRACE_ID:032x}-{0:016x}-01",
        "ff" + SAMPLED[2:],
        SAMPLED + "-more",
        "01" + SAMPLED[2:] + "-" + "x" * 100_000,
        "é" * 55,
    ],
)
def test_a_malformed_header_counts_as_none(header: str, caplog: pytest.LogCaptureFixture) -> None:
    exporter = Collected()
    subject = tracing(exporter)

    started = subject.begin(header, 99.5, "vendor=1")

    assert started.trace is not None
    started.trace.end()
    assert closed(subject, exporter)[REQUEST].parent is None
    assert f"{TRACE_ID:x}" not in started.trace.traceparent
    assert started.tracestate == ""
    assert caplog.records == [], "a caller fills no log"


def test_a_header_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    exporter = Collected()
    subject = tracing(exporter)

    started = subject.begin("01" + SAMPLED[2:] + "-more", 99.5)

    assert started.traceparent is not None
    assert started.traceparent.startswith(f"00-{TRACE_ID:032x}")
    closed(subject, exporter)


@pytest.mark.parametrize("parent", [SAMPLED, NOT_SAMPLED])
def test_the_callers_tracestate_goes_along(parent: str) -> None:
    exporter = Collected()
    subject = tracing(exporter)

    started = subject.begin(parent, 99.5, "congo=t61rcWkgMzE, tenant@vendor=00f0")
    if started.trace is not None:
        started.trace.add(PREFILL, 1.0, 2.0, {})
        started.trace.end()
    spans = closed(subject, exporter)

    assert started.headers == {"traceparent": started.traceparent, "tracestate": "congo=t61rcWkgMzE,tenant@vendor=00f0"}
    assert {span.context.trace_state.to_header() for span in spans.values()} <= {started.tracestate}
    assert len(spans) == (2 if parent == SAMPLED else 0)


@pytest.mark.parametrize(
    "state",
    [
        "",
        ",",
        "no pair",
        "Capital=1",
        "a=1,a=2",
        "a=\x00",
        "a=é",
        "a=" + "x" * 257,
        ",".join(f"k{n}=1234567890123" for n in range(40)),
    ],
)
def test_a_malformed_tracestate_is_left_out_and_the_parent_stays(state: str, caplog: pytest.LogCaptureFixture) -> None:
    exporter = Collected()
    subject = tracing(exporter)

    started = subject.begin(NOT_SAMPLED, 99.5, state)

    assert started.headers == {"traceparent": NOT_SAMPLED}
    assert caplog.records == [], "a caller's words are in no log"
    closed(subject, exporter)


def test_about_the_share_that_was_asked_for_is_sampled() -> None:
    exporter = Collected()
    subject = tracing(exporter, sample_ratio=0.25)

    started = [subject.begin(None, 99.5) for _ in range(2000)]

    assert 430 < sum(one.trace is not None for one in started) < 570
    assert all(one is NOT_TRACED for one in started if one.trace is None)
    closed(subject, exporter)


def test_an_error_is_told_by_its_class_alone() -> None:
    exporter = Collected()
    subject = tracing(exporter)

    trace = subject.begin(None, 99.5).trace
    assert trace is not None
    trace.add(PROVIDER, 1.0, 2.0, {}, "ReplicaLost")
    trace.end("ReplicaLost")
    spans = closed(subject, exporter)

    assert [dict(spans[name].attributes) for name in (REQUEST, PROVIDER)] == [{"error.type": "ReplicaLost"}] * 2
    assert not spans[REQUEST].status.is_ok
    assert spans[REQUEST].status.description is None
    assert not spans[REQUEST].events


def test_an_attribute_that_the_table_does_not_give_a_span_is_refused() -> None:
    exporter = Collected()
    subject = tracing(exporter)
    trace = subject.begin(None, 99.5).trace
    assert trace is not None

    with pytest.raises(AssertionError, match="the table gives decode no prompt"):
        trace.add(DECODE, 1.0, 2.0, {"prompt": "secret"})

    closed(subject, exporter)


def test_what_a_stuck_collector_does_not_take_is_dropped_and_counted_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing_module, "EXPORT_EVERY_S", 60.0)  # no smaller batch leaves, however busy the machine is
    exporter, counts = Collected(), Counter[str]()
    subject = tracing(exporter, count=lambda outcome, count: counts.update({outcome: count}))

    for _ in range(BATCH_SPANS):
        record(subject)
    assert exporter.has_begun.wait(30)  # one batch is out of the queue, and stuck
    for _ in range(MAX_HELD_SPANS + 7):
        record(subject)

    assert counts == {"dropped": 7}
    closed(subject, exporter)
    assert counts == {"dropped": 7, "exported": BATCH_SPANS + MAX_HELD_SPANS}
    assert len(exporter.spans) == BATCH_SPANS + MAX_HELD_SPANS


def test_spans_that_the_collector_refuses_are_counted_as_dropped() -> None:
    exporter, counts = Collected(SpanExportResult.FAILURE), Counter[str]()
    subject = tracing(exporter, count=lambda outcome, count: counts.update({outcome: count}))

    record(subject)
    closed(subject, exporter)

    assert counts == {"dropped": 1}


def test_closing_does_not_wait_for_a_stuck_collector() -> None:
    exporter = Collected()  # opens only when it is shut down
    subject = tracing(exporter)
    record(subject)

    subject.close()

    assert exporter.is_shut


def record(subject: Tracing) -> None:
    trace = subject.begin(None, 99.5).trace
    assert trace is not None
    trace.end()


def test_without_a_collector_there_is_no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)

    assert open_tracing(TelemetryConfig(), "x", lambda outcome, count: None, Random()) is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_the_standard_variables_name_a_collector_too_and_can_switch_it_off(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9/v1/traces")

    subject = open_tracing(TelemetryConfig(), "x", lambda outcome, count: None, Random())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert subject is not None
    subject.close()
    assert (
        open_tracing(TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"), "x", lambda outcome, count: None, Random())
        is None
    )


def test_a_callers_wish_to_be_recorded_is_granted_up_to_a_rate_and_no_other_caller_pays_for_it() -> None:
    exporter = Collected()
    subject = Tracing(
        exporter, 0.0, "gateway-1", lambda outcome, count: None, Random(1), lambda: 0.0, lambda: 100.0, caller_rate=3
    )

    greedy = [subject.begin(SAMPLED, 99.5, "vendor=1", "greedy") for _ in range(50)]
    assert [started.trace is not None for started in greedy] == [True] * 3 + [False] * 47
    assert (greedy[-1].traceparent, greedy[-1].tracestate) == (NOT_SAMPLED, "vendor=1")
    assert subject.begin(SAMPLED, 99.5, "", "other").trace is not None
    assert subject.begin(SAMPLED, 100.6, "", "greedy").trace is not None
    closed(subject, exporter)


def test_beyond_the_rate_the_gateways_own_ratio_decides() -> None:
    exporter = Collected()
    subject = Tracing(
        exporter, 0.25, "gateway-1", lambda outcome, count: None, Random(1), lambda: 0.0, lambda: 100.0, caller_rate=0
    )

    recorded = sum(subject.begin(SAMPLED, 99.5, "", "greedy").trace is not None for _ in range(1000))
    assert 200 < recorded < 300
    closed(subject, exporter)
