"""What an operator sees of the platform: one trace per request at a real OTLP collector, and every metric of the table
at work."""

import ast
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.parser import text_string_to_metric_families

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.base import telemetry as names
from penstock.base.metrics import TABLE
from penstock.cli.state import StateDir
from penstock.tenancy.tenants import Limits, Settings
from tests.integration.new_tenants import new_key
from tests.integration.waiting import wait_for
from tests.real_time import real_time

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{{{port: {{port}}}}}}
targets: {{{{standard: {{{{tpot_s: 0.002}}}}}}}}
telemetry: {{{{otlp_endpoint: "{endpoint}", sample_ratio: 1.0}}}}
pools:
  - {{{{name: demo, model: demo, served_names: [demo], tier: edge}}}}
  - name: played
    model: demo
    price_per_hour: 2.5
    served_names: [played, either]
    tier: edge
    autoscale: {{{{min_replicas: 1, max_replicas: 1}}}}
    engine:
      runner: timed
      max_num_seqs: 1
      admission_lookahead: 1
      speculation: {{{{method: ngram}}}}
      timed: {{{{base_s: 0.02}}}}
providers:
  - {{{{name: far, base_url: "{endpoint}/v1", model: large, served_names: [either], \
ttft_s: 0.05, input_price: 1.0, output_price: 2.0}}}}
"""
PROMPT = "Where does the quokka-zanzibar-heliotrope live?"
SKEW_S = 0.005
"""Largest difference allowed between two readings of the same machine's clocks."""
WITHIN_S = 20.0
REPORT_S = 3.0
"""Ample for a replica's load and a batch of spans."""
ELSEWHERE = {
    # a TCP stream loses no block event
    "penstock_index_gaps_total": "unit/router/replicas/test_fleet.py::test_a_gap_asks_once_for_a_snapshot",
    # loopback takes megabytes before a writer must wait
    "penstock_slow_clients_total": (
        "unit/router/dispatch/test_dispatcher_ends.py"
        "::test_a_reader_that_is_too_slow_loses_its_sequence_but_not_what_has_come"
    ),
    # only an autoscaler in Kubernetes has them, on a page of its own
    "penstock_autoscaler_is_leader": "unit/autoscale/kubernetes/test_pages.py::test_the_metrics_say_who_leads",
    "penstock_kubernetes_calls_total": (
        "unit/autoscale/kubernetes/test_client.py::test_every_call_counts_by_verb_resource_and_status"
    ),
    # nobody empties this Redis
    "penstock_redis_losses_total": "unit/tenancy/test_data_loss.py::test_each_gateway_says_once_that_the_data_is_lost",
    # Redis stays, and the provider answers
    "penstock_redis_away": (
        "unit/tenancy/test_data_loss.py::test_a_redis_that_is_away_and_comes_back_with_its_data_has_lost_nothing"
    ),
    "penstock_provider_breaker_open": (
        "unit/router/providers/test_provider.py"
        "::test_the_metrics_say_that_a_breaker_is_open_until_the_provider_has_answered_again"
    ),
    # no tenant has a budget, and no provider a cap
    "penstock_budget_refusals_total": (
        "unit/router/completions/test_charges.py::test_a_spent_budget_is_a_429_until_the_month_ends"
    ),
    "penstock_budget_used_ratio": (
        "unit/router/completions/test_charges.py::test_the_fullest_budgets_are_among_the_metrics_and_caps_are_not"
    ),
    "penstock_provider_cap_used_ratio": (
        "unit/router/dispatch/test_dispatcher_caps.py::test_the_metrics_say_how_much_of_a_cap_is_used"
    ),
    # no GPU here
    "penstock_compiled_kernels_total": (
        "unit/router/replicas/test_fleet.py::test_kernels_that_replicas_compiled_since_their_last_load_are_counted_once"
    ),
    # the load has no adapters
    **dict.fromkeys(
        ("penstock_adapter_uses_total", "penstock_adapter_loads_total", "penstock_adapter_evictions_total"),
        "integration/test_adapter_slots.py::test_a_hundred_adapters_on_eight_slots_under_a_zipf_load_fail_nobody",
    ),
    # no pool of the load escalates
    "penstock_escalations_total": (
        "unit/router/completions/test_escalation.py::test_an_unsure_beginning_is_never_shown_and_both_attempts_count"
    ),
    # the load has no batch
    "penstock_batch_lines_total": (
        "unit/router/api/test_openai_batches.py::test_a_batch_of_chats_from_upload_to_results"
    ),
    "penstock_batches_running": "integration/test_batches.py::test_a_batch_is_cancelled_and_one_expires",
    # no tariff is configured
    "penstock_charge_total": "unit/router/completions/test_admission.py::test_what_is_charged_counts_by_model",
    # the load sends none
    "penstock_ignored_fields_total": (
        "unit/router/completions/test_ignored_fields.py::test_ignored_fields_are_counted_by_name"
    ),
}
"""Metrics that stay at zero here, and the test that makes each of them count."""
ANSWER = ["Far ", "away."]
SETTINGS = Settings(tier_policy="cloud_first", limits=Limits(requests_per_minute=1))
"""Settings of a tenant whose first request goes to the provider, and whose second is refused."""


class Collector(ThreadingHTTPServer):
    """The receiving end of OTLP over HTTP (opentelemetry.io/docs/specs/otlp), and a provider of chats too. `raw` is all
    that was exported, as it came; `asked` has the headers of every chat."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.raw: list[bytes] = []
        self.spans: list[Span] = []
        self.asked: list[dict[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of(self, trace_id: str) -> dict[str, Span]:
        """A trace's spans, by name."""
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace_id}


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/chat/completions":
            self.server.asked.append({name.lower(): value for name, value in self.headers.items()})
            self._answer("text/event-stream", b"".join(b"data: %b\n\n" % event for event in [*_events(), b"[DONE]"]))
            return
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.server.raw.append(data)
        self._answer("application/x-protobuf", ExportTraceServiceResponse().SerializeToString())

    def _answer(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def _events() -> Iterator[bytes]:
    """ANSWER as a provider streams it."""
    for piece in ANSWER:
        yield json.dumps({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}).encode()
    yield json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}).encode()
    yield json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(ANSWER)}}).encode()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[PlatformProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # s: how long the last test waits for a batch to be given up
        with running_platform(
            tmp_path_factory.mktemp("platform"), CONFIG.format(endpoint=collector.endpoint)
        ) as running:
            yield running


@pytest.fixture
def client(platform: PlatformProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {platform.key}"}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


def chat(
    client: httpx.Client, model: str = "demo", traceparent: str | None = None, key: str | None = None, **fields: Any
) -> httpx.Response:
    """key: of another tenant than the client's."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 24,
        "temperature": 0,
        **fields,
    }
    headers = {} if traceparent is None else {"traceparent": traceparent, "tracestate": "vendor=opaque"}
    return client.post(
        "/v1/chat/completions", json=body, headers=headers | ({} if key is None else {"authorization": f"Bearer {key}"})
    )


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def values(client: httpx.Client) -> dict[str, float]:
    """Value of each metric, summed over its labels; a histogram's is its count."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            found.setdefault(line.split()[2], 0.0)
        elif not line.startswith("#"):
            name, value = line.split("{")[0].split()[0], float(line.split()[-1])
            name = name.removesuffix("_count")
            if name in found:
                found[name] += value
    return found


def test_one_trace_tells_of_gateway_queue_route_prefill_and_decode_under_the_clients_own_id(
    client: httpx.Client, collector: Collector
) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

    answer = chat(client, traceparent=f"00-{trace_id}-{span_id}-01")
    spans = wait_for(
        lambda: (
            (found := collector.of(trace_id)).keys() >= {"request", "queue", "route", "prefill", "decode"} and found
        ),
        WITHIN_S,
    )

    request = spans["request"]
    usage = answer.json()["usage"]
    assert answer.headers["traceparent"] == f"00-{trace_id}-{request.span_id.hex()}-01"
    assert set(spans) == {"request", "queue", "route", "prefill", "decode"}
    assert request.parent_span_id.hex() == span_id
    assert request.kind == Span.SPAN_KIND_SERVER
    assert {span.trace_state for span in spans.values()} == {"vendor=opaque"}
    assert {span.parent_span_id for name, span in spans.items() if name != "request"} == {request.span_id}
    assert attributes(request) | {names.TTFT: 0} == {
        names.REQUEST_ID: answer.headers["x-penstock-request-id"],
        names.TENANT: "demo",
        names.MODEL: "demo",
        names.PATH: "/v1/chat/completions",
        names.STATUS: 200,
        names.IS_STREAM: False,
        names.INPUT_TOKENS: usage["prompt_tokens"],
        names.OUTPUT_TOKENS: usage["completion_tokens"],
        names.TTFT: 0,
    }
    route, prefill, decode = (attributes(spans[name]) for name in ("route", "prefill", "decode"))
    assert (route[names.POOL], route[names.TIER], route[names.REPLICA]) == (
        "demo",
        "edge",
        answer.headers["x-penstock-replica"],
    )
    assert 1000 * route[names.PREDICTED_TTFT] == pytest.approx(
        float(answer.headers["x-penstock-predicted-ttft-ms"]), abs=0.06
    )
    assert route[names.REASON] == "only_replica"
    assert prefill[names.INPUT_TOKENS] == usage["prompt_tokens"]
    assert prefill[names.CACHED_TOKENS] == usage["prompt_tokens_details"]["cached_tokens"]
    assert (decode[names.OUTPUT_TOKENS], decode[names.FINISH]) == (
        usage["completion_tokens"],
        answer.json()["choices"][0]["finish_reason"],
    )
    assert prefill[names.REPLICA] == decode[names.REPLICA] == route[names.REPLICA]


@real_time
def test_the_spans_follow_one_another_within_the_request(client: httpx.Client, collector: Collector) -> None:
    trace_id = "5" * 32
    began = time.time_ns()

    chat(client, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
    ended = time.time_ns()
    spans = wait_for(lambda: (found := collector.of(trace_id)).keys() >= {"request", "decode"} and found, WITHIN_S)

    skew = int(SKEW_S * 1e9)
    edges = [
        (spans[name].start_time_unix_nano, spans[name].end_time_unix_nano)
        for name in ("queue", "route", "prefill", "decode")
    ]
    assert all(start <= end for start, end in edges)
    assert edges[0][1] == edges[1][0]  # the wait ends where routing begins
    assert edges[1][1] <= edges[2][0] + skew  # on to another process
    assert edges[2][1] == edges[3][0]  # the first token ends the one and begins the other
    request = spans["request"]
    assert began - skew <= request.start_time_unix_nano <= edges[0][0] + skew
    assert edges[3][1] - skew <= request.end_time_unix_nano <= ended + skew
    seconds = (edges[3][1] - edges[3][0]) / 1e9
    assert 0.3 < seconds / ((ended - began) / 1e9) < 1  # 24 tokens one by one are most of it
    assert attributes(request)[names.TTFT] == pytest.approx(
        (edges[2][1] - request.start_time_unix_nano) / 1e9, abs=0.05
    )


def test_a_caller_that_does_not_sample_is_not_recorded(client: httpx.Client, collector: Collector) -> None:
    sampled, unsampled = "6" * 32, "7" * 32

    quiet = chat(client, traceparent=f"00-{unsampled}-00f067aa0ba902b7-00")
    chat(client, traceparent=f"00-{sampled}-00f067aa0ba902b7-01")
    wait_for(lambda: "request" in collector.of(sampled), WITHIN_S)  # spans leave in the order of their ends

    assert quiet.headers["traceparent"] == f"00-{unsampled}-00f067aa0ba902b7-00"
    assert collector.of(unsampled) == {}


def test_a_request_that_fails_and_one_that_is_hung_up_on_say_so(
    client: httpx.Client, collector: Collector, platform: PlatformProcess
) -> None:
    wrong, gone = "8" * 32, "9" * 32

    chat(client, "no-such-model", f"00-{wrong}-00f067aa0ba902b7-01")
    hang_up(platform, f"00-{gone}-00f067aa0ba902b7-01")
    failed = wait_for(lambda: collector.of(wrong).get("request"), WITHIN_S)
    cut = wait_for(lambda: (found := collector.of(gone)).keys() >= {"request", "decode"} and found, WITHIN_S)

    assert (attributes(failed)[names.ERROR], attributes(failed)[names.STATUS], failed.status.code) == (
        "ModelNotFound",
        404,
        Status.STATUS_CODE_ERROR,
    )
    assert attributes(cut["request"])[names.ERROR] == "ClientGone"
    assert attributes(cut["decode"])[names.FINISH] == "abort"
    assert attributes(cut["decode"])[names.OUTPUT_TOKENS] < 400


def hang_up(platform: PlatformProcess, traceparent: str | None = None) -> None:
    """Go after two events of a long answer."""
    url = httpx.URL(platform.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"authorization": f"Bearer {platform.key}", "content-type": "application/json"}
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        headers if traceparent is None else headers | {"traceparent": traceparent},
    )
    response = connection.getresponse()
    for _ in range(6):
        response.readline()
    response.close()
    connection.close()


def test_a_provider_is_asked_within_the_same_trace(
    client: httpx.Client, collector: Collector, platform: PlatformProcess
) -> None:
    trace_id = "b" * 32

    answer = chat(client, "either", f"00-{trace_id}-00f067aa0ba902b7-01", new_key(platform, "traced", SETTINGS))
    spans = wait_for(lambda: (found := collector.of(trace_id)).keys() >= {"request", "provider"} and found, WITHIN_S)

    assert answer.json()["choices"][0]["message"]["content"] == "".join(ANSWER)
    assert set(spans) == {"request", "queue", "route", "provider"}
    assert (collector.asked[-1]["traceparent"], collector.asked[-1]["tracestate"]) == (
        answer.headers["traceparent"],
        "vendor=opaque",
    )
    said = attributes(spans["provider"])
    assert (said[names.POOL], said[names.TIER], said[names.OUTPUT_TOKENS], said[names.FINISH]) == (
        "far",
        "cloud",
        len(ANSWER),
        "stop",
    )
    assert spans["provider"].parent_span_id == spans["request"].span_id


def test_no_prompt_no_completion_and_no_key_reaches_the_collector_or_the_metrics(
    client: httpx.Client, collector: Collector, platform: PlatformProcess
) -> None:
    trace_id = "a" * 32

    said = chat(client, traceparent=f"00-{trace_id}-00f067aa0ba902b7-01", logprobs=True).json()["choices"][0][
        "message"
    ]["content"]
    client.post(
        "/v1/completions",
        json={"model": "demo", "prompt": PROMPT, "temperature": 99},
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    wait_for(
        lambda: (
            len([span for span in list(collector.spans) if span.trace_id.hex() == trace_id and span.name == "request"])
            == 2
        ),
        WITHIN_S,
    )

    chat(client, "a-name-of-my-own")
    raw, page = b"".join(collector.raw), client.get("/metrics").content

    assert len(said) > 30
    pieces = [said[start : start + 8] for start in range(0, len(said) - 8, 4)]
    secrets = ["quokka", "zanzibar", platform.key, platform.key[-12:], "a-name-of-my-own"]
    assert [piece for piece in [*pieces, *secrets] if piece.encode() in raw] == []
    assert [secret for secret in secrets if secret.encode() in page] == []


def test_no_prompt_no_completion_and_no_key_reaches_a_log(client: httpx.Client, platform: PlatformProcess) -> None:
    """The platform's own log, and those of Ray's processes, in which gateways and replicas write."""
    said = chat(client, max_tokens=48).json()["choices"][0]["message"]["content"]
    chat(client, temperature=99)
    httpx.get(
        f"{platform.url}/v1/models", headers={"authorization": "Bearer sk-penstock-" + "ab" * 24}, trust_env=False
    )
    run = StateDir(platform.state).read()
    assert run is not None
    files = [StateDir(platform.state).log_path, *Path(run.temp_dir).rglob("logs/**/*.*")]
    logs = {path: path.read_bytes() for path in files if path.is_file()}

    assert len(said) > 30
    assert any("gateway" in path.name and log for path, log in logs.items())
    assert any("pool-demo" in path.name and log for path, log in logs.items())
    pieces = [said[start : start + 12] for start in range(0, len(said) - 12, 4)]
    for secret in ["quokka", "zanzibar", platform.key, platform.key[-12:], "ab" * 24, *pieces]:
        assert [path for path, log in logs.items() if secret.encode() in log] == [], secret


def slo_requests(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Requests by model and outcome, of all classes and tiers."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples if family.name == "penstock_slo_requests" else ():
            key = sample.labels["model"], sample.labels["outcome"]
            found[key] = found.get(key, 0.0) + sample.value
    return found


@real_time
def test_what_finishes_counts_by_its_targets_and_its_receipt_says_so(client: httpx.Client) -> None:
    before = slo_requests(client)

    slow = chat(client, "played", ignore_eos=True)  # 20 ms a step, of at most six tokens; the target is 2 ms a token
    provided = chat(client, "either", max_tokens=1)
    chat(client, "played", temperature=99)
    receipts = [
        client.get(f"/v1/receipts/{answer.headers['x-penstock-request-id']}").json()["target"]
        for answer in (slow, provided)
    ]

    def risen() -> dict[tuple[str, str], float]:
        now = slo_requests(client)
        return {key: now[key] - before.get(key, 0.0) for key in now if now[key] != before.get(key, 0.0)}

    wait_for(lambda: sum(risen().values()) >= 2, WITHIN_S)  # a page may be a tenth of a second old
    assert risen() == {("played", "tpot"): 1.0, ("either", "met"): 1.0}
    assert [receipt["outcome"] for receipt in receipts] == ["tpot", "met"]
    assert (receipts[0]["class"], receipts[0]["ttft_target_s"], receipts[0]["tpot_target_s"]) == (
        "standard",
        1.0,
        0.002,
    )
    assert 0.002 < receipts[0]["tpot_s"] < 0.2
    assert 0 < receipts[1]["ttft_s"] < 1.0


def test_every_metric_of_the_table_is_scraped_and_not_zero_after_a_load(
    client: httpx.Client, platform: PlatformProcess
) -> None:
    highest: dict[str, float] = {}

    def scrape() -> None:
        for name, value in values(client).items():
            highest[name] = max(highest.get(name, 0.0), value)

    def one(number: int) -> int:
        return chat(
            client, "played" if number % 2 else "demo", max_tokens=16, stream=number % 3 == 0, ignore_eos=True
        ).status_code

    key = new_key(platform, "measured", SETTINGS)
    others = [chat(client, "either", key=key) for _ in range(2)]
    hang_up(platform)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(one, number) for number in range(24)]
        while not all(answer.done() for answer in answers):  # gauges are of a moment
            scrape()
            time.sleep(0.02)
    deadline = time.monotonic() + REPORT_S
    at_work = [row.name for row in TABLE if row.name not in ELSEWHERE]
    while time.monotonic() < deadline and any(not highest.get(name) for name in at_work):
        scrape()  # the last loads and spans are on their way
        time.sleep(0.02)

    assert {answer.result() for answer in answers} == {200}
    assert [answer.status_code for answer in others] == [200, 429]
    assert {row.name for row in TABLE} <= set(highest)
    assert [name for name in at_work if not highest[name]] == []
    assert [name for name in ELSEWHERE if highest[name]] == []


@pytest.mark.parametrize(("name", "test"), ELSEWHERE.items())
def test_what_stays_at_zero_here_is_asserted_by_a_test_of_its_own(name: str, test: str) -> None:
    path, _, function = test.partition("::")
    module = ast.parse((Path(__file__).parents[1] / path).read_text(encoding="utf-8"))
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    (found,) = [node for node in functions if node.name == function]

    assert any(name in ast.unparse(node.test) for node in ast.walk(found) if isinstance(node, ast.Assert))


def test_the_platform_goes_on_without_a_collector_and_counts_what_it_drops(
    client: httpx.Client, collector: Collector
) -> None:
    """The last one: it ends the collector."""
    collector.shutdown()
    collector.server_close()

    answers = [chat(client) for _ in range(3)]

    assert {answer.status_code for answer in answers} == {200}
    assert wait_for(lambda: 'outcome="dropped"' in (text := client.get("/metrics").text) and text, WITHIN_S)
