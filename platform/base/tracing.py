"""Traces of requests, recorded with OpenTelemetry's SDK and sent away over OTLP/HTTP by a thread of its own.

Not the names (see `telemetry`), and not what they mean (`router.completions.spans`). Whether a request is traced is
decided when it arrives: by the caller where it sends a `traceparent` (W3C Trace Context, level 1), up to a rate for
each caller, else at random, by the sample ratio. Invariants: recording never waits; what the collector does not take in
time is dropped and counted; malformed headers of a caller are ignored, and never logged.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.base.pace import Pace
from penstock.base.telemetry import CALLER_RATE, ERROR, PROVIDER, REQUEST, SPANS, TelemetryConfig

MAX_HELD_SPANS = 2048
"""Spans that have ended and are not sent; more are dropped."""
BATCH_SPANS = 64
"""Spans encoded at once. Few, because meanwhile the event loop may have to wait for the interpreter."""
EXPORT_EVERY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
"""Timeout of sending one batch, retries included."""
CLOSE_S = 2.0
"""Time that the last batches get at the end of the process."""
MAX_PARENT_CHARS = 128
"""Longest `traceparent` that is read; version 00 has 55 characters, and later ones may have more."""
MAX_STATE_CHARS = 512
"""Longest `tracestate` that is passed on: the recommendation asks for as much."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

EXPORTED, DROPPED = "exported", "dropped"

Value = str | int | float | bool
Attributes = Mapping[str, Value | None]
"""Values of attributes by name; None: not known, and left out."""

_ALLOWED = {row.name: frozenset(row.attributes) for row in SPANS}
_propagator = TraceContextTextMapPropagator()
_state_member = re.compile(
    r"[a-z0-9][a-z0-9_*/@-]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""key=value, as the recommendation has it."""


class StartedTrace(NamedTuple):
    """A request whose tracing has been decided."""

    traceparent: str | None
    """Header for the response, and for other servers that work on the request."""
    trace: "Trace | None"
    """Where the request's spans go; None: it is not recorded."""
    tracestate: str = ""
    """Header of the caller's, for other servers that work on the request."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers to send to another server that works on the request."""
        if self.traceparent is None:
            return {}
        return {"traceparent": self.traceparent} | ({"tracestate": self.tracestate} if self.tracestate else {})


NOT_TRACED = StartedTrace(None, None)


class Tracing:
    """Decides which requests are traced, and sends their spans.

    count: called with how many spans were EXPORTED or DROPPED, from any thread. now: Unix time, seconds. clock: the
    monotonic clock on which callers measure, seconds. caller_rate: requests of one caller per second for which its word
    that they be recorded is taken.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        sample_ratio: float,
        instance: str,
        count: Callable[[str, int], None],
        random: Random,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        caller_rate: float = CALLER_RATE,
    ) -> None:
        resource = Resource({"service.name": "penstock", "service.instance.id": instance}).merge(
            OTELResourceDetector().detect()
        )
        self._exporter = _CountingExporter(exporter, count)
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_BoundedProcessor(self._exporter, count))
        self._tracer = self._provider.get_tracer("penstock")
        self._sample_ratio = sample_ratio
        self._random = random
        self._now = now
        self._clock = clock
        self._callers = Pace(caller_rate, caller_rate) if caller_rate else None

    def begin(self, traceparent: str | None, began_s: float, tracestate: str = "", caller: str = "") -> StartedTrace:
        """Decide whether a request with these headers is traced. began_s: when it came, by the clock. tracestate:
        several such headers are joined by commas. caller: whose rate of records it counts against."""
        parent = None if traceparent is None else _context_of(traceparent, tracestate)
        if parent is None:
            return self._record(None, began_s) if self._is_sampled() else NOT_TRACED
        if not parent.trace_flags.sampled or not (self._may_decide(caller, began_s) or self._is_sampled()):
            return StartedTrace(_format(parent, is_sampled=False), None, parent.trace_state.to_header())
        return self._record(parent, began_s)

    def _may_decide(self, caller: str, now_s: float) -> bool:
        return self._callers is not None and self._callers.take(caller, now_s)

    def _is_sampled(self) -> bool:
        return self._random.random() < self._sample_ratio

    def _record(self, parent: SpanContext | None, began_s: float) -> StartedTrace:
        trace = Trace(self._tracer, parent, began_s, self._now() - self._clock(), self._now)
        return StartedTrace(trace.traceparent, trace, "" if parent is None else parent.trace_state.to_header())

    def close(self) -> None:
        """Send what is left, for up to CLOSE_S and one more try. Blocks."""
        limit = threading.Timer(CLOSE_S, self._exporter.shutdown)
        limit.start()
        self._provider.shutdown()
        limit.cancel()


class Trace:
    """The trace of one request: its own span, and those below it. Times are Unix time, in seconds."""

    __slots__ = ("_ahead_s", "_context", "_now", "_span", "_tracer", "traceparent")

    def __init__(
        self, tracer: otel.Tracer, parent: SpanContext | None, began_s: float, ahead_s: float, now: Callable[[], float]
    ) -> None:
        """began_s: when the request came, by the monotonic clock. ahead_s: Unix time less the monotonic clock."""
        remote = otel.set_span_in_context(otel.NonRecordingSpan(parent or otel.INVALID_SPAN_CONTEXT))
        self._tracer = tracer
        self._ahead_s = ahead_s
        self._now = now
        self._span = tracer.start_span(REQUEST, remote, SpanKind.SERVER, start_time=_ns(self.unix_s(began_s)))
        self._context = otel.set_span_in_context(self._span)
        self.traceparent = format_context(self._span.get_span_context())

    def now_s(self) -> float:
        return self._now()

    def unix_s(self, monotonic_s: float) -> float:
        """Unix time of a moment that was measured on the monotonic clock."""
        return monotonic_s + self._ahead_s

    def note(self, attributes: Attributes) -> None:
        """Set attributes of the request's own span."""
        _note(self._span, REQUEST, attributes)

    def add(self, name: str, began_s: float, ended_s: float, attributes: Attributes, error: str | None = None) -> None:
        """Record a span below the request's, which is over. error: the class of what went wrong."""
        kind = SpanKind.CLIENT if name == PROVIDER else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._context, kind, start_time=_ns(began_s))
        _note(span, name, attributes)
        _end(span, ended_s, error)

    def end(self, error: str | None = None) -> None:
        """End the request's own span. error: the class of what went wrong."""
        _end(self._span, self._now(), error)


def open_tracing(
    config: TelemetryConfig, instance: str, count: Callable[[str, int], None], random: Random
) -> Tracing | None:
    """Start tracing to the collector that the settings name, or else OpenTelemetry's environment variables, which also
    hold headers and certificates.

    Returns None if neither names a collector, or if OTEL_SDK_DISABLED is true.
    """
    is_named = config.otlp_endpoint is not None or any(os.environ.get(name) for name in ENDPOINTS)
    if not is_named or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoint = None if config.otlp_endpoint is None else f"{config.otlp_endpoint.rstrip('/')}/v1/traces"
    timeout_s = None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else EXPORT_TIMEOUT_S
    exporter = OTLPSpanExporter(endpoint, timeout=timeout_s)
    return Tracing(exporter, config.sample_ratio, instance, count, random, caller_rate=config.caller_samples_per_s)


def format_context(context: SpanContext) -> str:
    """Value of the `traceparent` header for a context."""
    return _format(context, is_sampled=context.trace_flags.sampled)


def _format(context: SpanContext, *, is_sampled: bool) -> str:
    flags = TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def _context_of(traceparent: str, tracestate: str) -> SpanContext | None:
    """Context that the caller's headers hold. Returns None if the parent is malformed; it counts as not sent. A
    malformed state alone is left out. (The SDK would log both, with the caller's text.)"""
    if len(traceparent) > MAX_PARENT_CHARS:
        return None
    carrier = {"traceparent": traceparent} | ({"tracestate": tracestate} if _is_state(tracestate) else {})
    context = otel.get_current_span(_propagator.extract(carrier)).get_span_context()
    return context if context.is_valid else None


def _is_state(tracestate: str) -> bool:
    if not tracestate or len(tracestate) > MAX_STATE_CHARS:
        return False
    members = [member.strip(" \t") for member in tracestate.split(",")]
    return all(_state_member.fullmatch(member) for member in members if member)


def _note(span: Span, name: str, attributes: Attributes) -> None:
    allowed = _ALLOWED[name]
    for key, value in attributes.items():
        assert key in allowed, f"the table gives {name} no {key}"
        if value is not None:
            span.set_attribute(key, value)


def _end(span: Span, ended_s: float, error: str | None) -> None:
    if error is not None:
        span.set_attribute(ERROR, error)
        span.set_status(Status(StatusCode.ERROR))
    span.end(_ns(ended_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class _CountingExporter(SpanExporter):
    """Counts what became of the spans it passes on."""

    def __init__(self, exporter: SpanExporter, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._count = count
        self._is_shut = threading.Lock()
        self.num_taken = 0
        """Spans that have left the queue; written by the exporting thread only."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(spans)
        self._count(EXPORTED if result is SpanExportResult.SUCCESS else DROPPED, len(spans))
        return result

    def shutdown(self) -> None:
        if self._is_shut.acquire(blocking=False):
            self._exporter.shutdown()


class _BoundedProcessor(SpanProcessor):
    """The SDK's queue and thread, which would drop silently, behind a count of what it holds. Spans end on one thread,
    the event loop's."""

    def __init__(self, exporter: _CountingExporter, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._count = count
        self._num_given = 0
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_HELD_SPANS,
            schedule_delay_millis=1000 * EXPORT_EVERY_S,
            max_export_batch_size=BATCH_SPANS,
        )

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_given - self._exporter.num_taken >= MAX_HELD_SPANS:
            self._count(DROPPED, 1)
        else:
            self._num_given += 1
            self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it untyped

    def force_flush(self, timeout_millis: int | None = None) -> bool:
        return self._batches.force_flush(timeout_millis)
