"""THE table of every metric: name, kind, labels, buckets and what it means; and `Metrics`, the instruments made from
it.

Not a place for values: whoever counts holds a `Metrics` and adds to it. Labels come from configuration (pool, model,
tier) or from small fixed sets (code, kind), never from what a caller sent: a label is never a prompt, a key or a free
name. Times are seconds.
"""

from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.base.metric_notes import Notes

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of what `Metrics.render` returns: Prometheus' text format."""


class Metric(NamedTuple):
    """A row of the table."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE: tuple[Metric, ...] = (
    Metric(
        "penstock_requests_total",
        "counter",
        "Requests answered, by the model asked for and the HTTP status.",
        ("model", "code"),
    ),
    Metric("penstock_request_seconds", "histogram", "Request received to last byte.", ("model",), REQUEST_BUCKETS_S),
    Metric("penstock_ttft_seconds", "histogram", "Request received to first token.", ("model",), LATENCY_BUCKETS_S),
    Metric(
        "penstock_tpot_seconds",
        "histogram",
        "Time per output token after the first, a mean over one answer.",
        ("model",),
        TOKEN_BUCKETS_S,
    ),
    Metric("penstock_queue_seconds", "histogram", "Waiting for a replica.", ("model",), LATENCY_BUCKETS_S),
    Metric(
        "penstock_tokens_total", "counter", "Tokens of finished requests; kind is prompt or output.", ("model", "kind")
    ),
    Metric(
        "penstock_prefix_lookup_tokens_total",
        "counter",
        "Prompt tokens whose KV was looked up in a replica's cache.",
        ("model",),
    ),
    Metric(
        "penstock_prefix_hit_tokens_total",
        "counter",
        "Prompt tokens whose KV was found in a replica's cache.",
        ("model",),
    ),
    Metric(
        "penstock_prefix_predicted_tokens_total",
        "counter",
        "Prompt tokens that the index said the chosen replica held.",
        ("model",),
    ),
    Metric(
        "penstock_prefix_true_tokens_total",
        "counter",
        "Predicted prompt tokens that the replica did hold: precision is true / predicted, recall true / hit.",
        ("model",),
    ),
    Metric("penstock_queue_length", "gauge", "Requests waiting for a replica in this gateway.", ("pool",)),
    Metric("penstock_replicas", "gauge", "Replicas this gateway can route to.", ("pool", "tier")),
    Metric(
        "penstock_replicas_wanted",
        "gauge",
        "Replicas that the configuration gives the pool; none of pools that are scaled, see penstock_autoscale_target.",
        ("pool",),
    ),
    Metric("penstock_autoscale_target", "gauge", "Replicas that the autoscaler wants of the pool.", ("pool",)),
    Metric(
        "penstock_autoscale_decisions_total",
        "counter",
        "The autoscaler's looks at the pool, by what it decided.",
        ("pool", "reason"),
    ),
    Metric(
        "penstock_autoscaler_is_leader",
        "gauge",
        "1 on the autoscaler that holds the Lease, 0 on the others (Kubernetes).",
        ("lease",),
    ),
    Metric(
        "penstock_kubernetes_calls_total",
        "counter",
        "The autoscaler's calls to the Kubernetes API; code is the HTTP status, or away where there was no answer.",
        ("verb", "resource", "code"),
    ),
    Metric(
        "penstock_running_sequences",
        "gauge",
        "Sequences running on the pool's replicas, other gateways' included.",
        ("pool",),
    ),
    Metric(
        "penstock_waiting_sequences", "gauge", "Sequences that the pool's replicas have and do not run yet.", ("pool",)
    ),
    Metric("penstock_kv_blocks", "gauge", "KV blocks of the pool's replicas; 1 - free / all is their use.", ("pool",)),
    Metric("penstock_kv_blocks_free", "gauge", "KV blocks free or evictable on the pool's replicas.", ("pool",)),
    Metric(
        "penstock_step_cost",
        "gauge",
        "Coefficients of the performance model, a mean of the pool's replicas, mostly seconds; for penstock plan.",
        ("pool", "coefficient"),
    ),
    Metric("penstock_index_blocks", "gauge", "Blocks in this gateway's mirror of the prefix index.", ("pool",)),
    Metric(
        "penstock_index_gaps_total",
        "counter",
        "Gaps seen in replicas' block events, each answered by a snapshot.",
        ("pool",),
    ),
    Metric(
        "penstock_draft_tokens_total",
        "counter",
        "Draft tokens verified by the pool's replicas, for other gateways too.",
        ("pool",),
    ),
    Metric(
        "penstock_accepted_draft_tokens_total",
        "counter",
        "Draft tokens that were what the model says; see penstock_draft_tokens_total.",
        ("pool",),
    ),
    Metric(
        "penstock_compiled_kernels_total",
        "counter",
        "Kernels that the pool's replicas on GPUs compiled after they were ready: each makes requests wait.",
        ("pool",),
    ),
    Metric(
        "penstock_adapter_uses_total",
        "counter",
        "Sequences with an adapter at the pool's replicas; outcome is hit (in a slot) or wait (it had to be loaded).",
        ("pool", "outcome"),
    ),
    Metric(
        "penstock_adapter_loads_total", "counter", "Adapters that came into slots of the pool's replicas.", ("pool",)
    ),
    Metric(
        "penstock_adapter_evictions_total",
        "counter",
        "Adapters that left slots of the pool's replicas, for others or because they were deleted.",
        ("pool",),
    ),
    Metric(
        "penstock_route_attempts_total",
        "counter",
        "Submissions to replicas; reason is first, retry (no token was out) or resume.",
        ("pool", "reason"),
    ),
    Metric(
        "penstock_tier_decisions_total",
        "counter",
        "Submissions by the tier that was chosen and why.",
        ("pool", "tier", "reason"),
    ),
    Metric(
        "penstock_escalations_total",
        "counter",
        "Answers that began at an edge pool that escalates: kept, escalated, not_allowed, no_cloud or constraint.",
        ("model", "outcome"),
    ),
    Metric(
        "penstock_provider_requests_total",
        "counter",
        "Requests made of a provider; outcome is finished, refused, failed or cut (not wanted any more).",
        ("provider", "outcome"),
    ),
    Metric(
        "penstock_cost_total",
        "counter",
        "Price of the time of the pool's replicas, other gateways' requests included; kind is requests, idle, start, "
        "drain or failed.",
        ("pool", "kind"),
    ),
    Metric(
        "penstock_charge_total",
        "counter",
        "What tenants are charged for this gateway's requests and lines of batches that are over, by the tariffs.",
        ("model",),
    ),
    Metric(
        "penstock_provider_cost_total",
        "counter",
        "What a provider's answers cost, in the currency of its prices; one that was cut off costs what had come.",
        ("provider",),
    ),
    Metric(
        "penstock_provider_breaker_open",
        "gauge",
        "1 from the failures that made this gateway stop asking a provider until it answers again, else 0.",
        ("provider",),
    ),
    Metric("penstock_slow_clients_total", "counter", "Sequences aborted because their client did not read."),
    Metric(
        "penstock_spans_total",
        "counter",
        "Spans of traces; outcome is exported, or dropped where the collector did not take them in time.",
        ("outcome",),
    ),
    Metric("penstock_redis_away", "gauge", "1 while Redis does not answer this gateway, else 0; looked at every 5 s."),
    Metric("penstock_redis_losses_total", "counter", "Times that Redis was found without the data that it had before."),
    Metric(
        "penstock_rate_limited_total",
        "counter",
        "Requests refused by a tenant's limit: requests, tokens or parallel.",
        ("limit",),
    ),
    Metric(
        "penstock_budget_refusals_total",
        "counter",
        "Requests refused by a tenant's budget (tenant), or by what providers may cost (cap).",
        ("kind",),
    ),
    Metric(
        "penstock_budget_used_ratio",
        "gauge",
        "Part of its budget of the month that a tenant has spent or reserved: the fullest that this gateway serves.",
        ("tenant",),
    ),
    Metric(
        "penstock_provider_cap_used_ratio",
        "gauge",
        "Part of the cap of the month that a provider has cost or reserved; all is the cap of all together.",
        ("provider",),
    ),
    Metric("penstock_client_disconnects_total", "counter", "Requests whose client hung up before the end.", ("model",)),
    Metric(
        "penstock_ignored_fields_total",
        "counter",
        "Fields of requests that were accepted and change nothing, by name; other is a name outside the table.",
        ("field",),
    ),
    Metric(
        "penstock_batch_lines_total",
        "counter",
        "Lines of batches that this gateway has run: completed, failed, or repeated because there was no room.",
        ("outcome",),
    ),
    Metric("penstock_batches_running", "gauge", "Batches that this gateway runs."),
    Metric(
        "penstock_slo_requests_total",
        "counter",
        "Requests that are over by what became of their targets; outcome is met, ttft, tpot (out of it) or failed.",
        ("model", "class", "tier", "outcome"),
    ),
    Metric(
        "penstock_slo_tokens_total",
        "counter",
        "Output tokens of those requests; those of outcome met are goodput.",
        ("model", "class", "tier", "outcome"),
    ),
    Metric(
        "penstock_tenant_slo_requests_total",
        "counter",
        "The same requests by tenant: of the busiest ones, and other.",
        ("tenant", "outcome"),
    ),
    Metric(
        "penstock_slo_burn_rate",
        "gauge",
        "Share of requests out of target over a window, 5m, 1h or 6h, divided by what targets.objective leaves.",
        ("model", "class", "tier", "window"),
    ),
    Metric("penstock_slo_objective", "gauge", "Share of requests that should be in target: targets.objective."),
    Metric(
        "penstock_ttft_prediction_ratio",
        "histogram",
        "Time to first token since a sequence was placed, as a part of what was predicted there.",
        ("model", "class", "tier"),
        RATIO_BUCKETS,
    ),
)


class Metrics:
    """One instrument for each row of TABLE, on a registry of its own, so that two gateways in one process never share
    counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.notes = Notes()
        """Samples that wait to be recorded."""
        self.registry.register(self.notes)  # first, so that those behind it have what is noted
        rows = {row.name: row for row in TABLE}

        def counter(name: str) -> Counter:
            row = rows.pop(name)
            return Counter(name, row.help, row.labels, registry=self.registry)

        def gauge(name: str) -> Gauge:
            row = rows.pop(name)
            return Gauge(name, row.help, row.labels, registry=self.registry)

        def histogram(name: str) -> Histogram:
            row = rows.pop(name)
            return Histogram(name, row.help, row.labels, registry=self.registry, buckets=row.buckets)

        self.requests = counter("penstock_requests_total")
        self.request_s = histogram("penstock_request_seconds")
        self.ttft_s = histogram("penstock_ttft_seconds")
        self.tpot_s = histogram("penstock_tpot_seconds")
        self.queue_s = histogram("penstock_queue_seconds")
        self.tokens = counter("penstock_tokens_total")
        self.prefix_lookup_tokens = counter("penstock_prefix_lookup_tokens_total")
        self.prefix_hit_tokens = counter("penstock_prefix_hit_tokens_total")
        self.prefix_predicted_tokens = counter("penstock_prefix_predicted_tokens_total")
        self.prefix_true_tokens = counter("penstock_prefix_true_tokens_total")
        self.queue_length = gauge("penstock_queue_length")
        self.replicas = gauge("penstock_replicas")
        self.replicas_wanted = gauge("penstock_replicas_wanted")
        self.autoscale_target = gauge("penstock_autoscale_target")
        self.autoscale_decisions = counter("penstock_autoscale_decisions_total")
        self.autoscaler_is_leader = gauge("penstock_autoscaler_is_leader")
        self.kubernetes_calls = counter("penstock_kubernetes_calls_total")
        self.running_sequences = gauge("penstock_running_sequences")
        self.waiting_sequences = gauge("penstock_waiting_sequences")
        self.kv_blocks = gauge("penstock_kv_blocks")
        self.kv_blocks_free = gauge("penstock_kv_blocks_free")
        self.step_cost = gauge("penstock_step_cost")
        self.index_blocks = gauge("penstock_index_blocks")
        self.index_gaps = counter("penstock_index_gaps_total")
        self.draft_tokens = counter("penstock_draft_tokens_total")
        self.accepted_draft_tokens = counter("penstock_accepted_draft_tokens_total")
        self.compiled_kernels = counter("penstock_compiled_kernels_total")
        self.adapter_uses = counter("penstock_adapter_uses_total")
        self.adapter_loads = counter("penstock_adapter_loads_total")
        self.adapter_evictions = counter("penstock_adapter_evictions_total")
        self.route_attempts = counter("penstock_route_attempts_total")
        self.tier_decisions = counter("penstock_tier_decisions_total")
        self.escalations = counter("penstock_escalations_total")
        self.provider_requests = counter("penstock_provider_requests_total")
        self.cost = counter("penstock_cost_total")
        self.charge = counter("penstock_charge_total")
        self.provider_cost = counter("penstock_provider_cost_total")
        self.provider_breaker_open = gauge("penstock_provider_breaker_open")
        self.slow_clients = counter("penstock_slow_clients_total")
        self.spans = counter("penstock_spans_total")
        self.redis_away = gauge("penstock_redis_away")
        self.redis_losses = counter("penstock_redis_losses_total")
        self.rate_limited = counter("penstock_rate_limited_total")
        self.budget_refusals = counter("penstock_budget_refusals_total")
        self.budget_used_ratio = gauge("penstock_budget_used_ratio")
        self.provider_cap_used_ratio = gauge("penstock_provider_cap_used_ratio")
        self.client_disconnects = counter("penstock_client_disconnects_total")
        self.ignored_fields = counter("penstock_ignored_fields_total")
        self.batch_lines = counter("penstock_batch_lines_total")
        self.batches_running = gauge("penstock_batches_running")
        self.slo_requests = counter("penstock_slo_requests_total")
        self.slo_tokens = counter("penstock_slo_tokens_total")
        self.tenant_slo_requests = counter("penstock_tenant_slo_requests_total")
        self.slo_burn_rate = gauge("penstock_slo_burn_rate")
        self.slo_objective = gauge("penstock_slo_objective")
        self.ttft_prediction_ratio = histogram("penstock_ttft_prediction_ratio")
        assert not rows, f"no instrument for {sorted(rows)}"

    def render(self) -> bytes:
        """All metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self.registry)
