"""An OpenTelemetry collector of one request: `python examples/tour/trace.py MODEL`.

Listens where examples/tour/penstock.yaml sends spans, makes a request under a trace id of its own, and prints what
arrives: a line for each span, when it began and how long it took. A real collector (Jaeger, Tempo, ...) listens in its
place as well.
"""

import os
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ADDRESS = ("127.0.0.1", 4318)
EXPECTED = {"request", "queue", "route", "prefill", "decode"}
WITHIN_S = 20.0


class Collector(HTTPServer):
    """The receiving end of OTLP over HTTP: one batch of spans with each request."""

    timeout = 1.0

    def __init__(self) -> None:
        super().__init__(ADDRESS, Batch)
        self.spans: list[Span] = []


class Batch(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def ask(model: str, trace_id: str) -> None:
    headers = {
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
    }
    body = {"model": model, "messages": [{"role": "user", "content": "What is a trace?"}], "max_tokens": 16}
    httpx.post(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
    ).raise_for_status()


def collect(collector: Collector, trace_id: str) -> list[Span]:
    """The trace's spans by their beginnings; fewer than expected when they do not come in time."""
    deadline = time.monotonic() + WITHIN_S
    found: list[Span] = []
    while {span.name for span in found} < EXPECTED and time.monotonic() < deadline:
        collector.handle_request()
        found = [span for span in collector.spans if span.trace_id.hex() == trace_id]
    return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))


def main(model: str) -> None:
    trace_id = secrets.token_hex(16)
    with Collector() as collector:
        ask(model, trace_id)
        spans = collect(collector, trace_id)
    for span in spans:
        start_ms = (span.start_time_unix_nano - spans[0].start_time_unix_nano) / 1e6
        length_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        print(f"{'' if span.name == 'request' else '  '}{span.name:10} at {start_ms:.1f} ms for {length_ms:.1f} ms")
    raise SystemExit(0 if {span.name for span in spans} >= EXPECTED else 1)


if __name__ == "__main__":
    main(sys.argv[1])
