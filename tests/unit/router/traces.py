"""What a gateway records of its requests, kept in memory."""

from random import Random

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.base.tracing import Tracing

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""A `traceparent` as a client sends it: recorded."""


class Traces:
    """A tracing whose spans can be read."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter, 1.0, "gateway-1", lambda outcome, count: None, Random(0))

    def spans(self) -> list[ReadableSpan]:
        """The recorded spans in the order in which they ended; nothing is recorded after this call."""
        self.tracing.close()
        return list(self._exporter.get_finished_spans())
