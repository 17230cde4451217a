"""What the Grafana dashboards show: panels by section, in the order in which somebody who was paged looks at them.

A metric alone is shown as its row of the table says (`shown`): counters as rates, histograms as quantiles, gauges as
they are, the row's help beside it. Ratios and what belongs together is written out. Invariant: every row of the table
is on a dashboard; what no panel names stands at the end of the board that its prefix belongs to.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from deploy.dashboards.promql import series, without_suffix
from penstock.base.metrics import TABLE, Metric

RATE = "[$__rate_interval]"
QUANTILES = (0.5, 0.9, 0.99)
TOLD_BY_REPLICAS = frozenset(
    {
        *("penstock_replicas", "penstock_replicas_wanted", "penstock_running_sequences", "penstock_waiting_sequences"),
        *("penstock_kv_blocks", "penstock_kv_blocks_free", "penstock_index_blocks"),
        *("penstock_draft_tokens_total", "penstock_accepted_draft_tokens_total", "penstock_compiled_kernels_total"),
        *("penstock_adapter_uses_total", "penstock_adapter_loads_total", "penstock_adapter_evictions_total"),
        *("penstock_autoscale_target", "penstock_autoscale_decisions_total"),
        *("penstock_budget_used_ratio", "penstock_provider_cap_used_ratio"),
        *("penstock_redis_away", "penstock_provider_breaker_open", "penstock_slo_objective", "penstock_slo_burn_rate"),
    }
)
"""Metrics that every gateway says for all of them: the most is shown, not the sum."""
OF_THE_AUTOSCALER = ("penstock_autoscaler_is_leader", "penstock_kubernetes_calls_total")
"""Metrics of the autoscaler's own page (Kubernetes), which is another job than the gateways'."""
REST = "Further"
"""Title of the section of metrics that no panel names."""


class Query(NamedTuple):
    """A line, or a line for each set of labels. legend: Grafana's, with {{label}}."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A chart. unit: Grafana's name of it."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    description: str = ""
    kind: Literal["timeseries", "stat"] = "timeseries"


class Section(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


class Board(NamedTuple):
    """A dashboard. prefixes: of metrics that it shows though no panel names them."""

    name: str
    title: str
    sections: tuple[Section, ...]
    prefixes: tuple[str, ...] = ()


def unit_of(row: Metric) -> str:
    if row.name.endswith("_seconds"):
        return "s"
    if row.name.endswith("_ratio"):
        return "percentunit"
    return "cps" if row.kind == "counter" and row.name.endswith("_tokens_total") else "short"


def shown(row: Metric) -> Panel:
    """The row of the table as a panel of its own."""
    combine = "max" if row.name in TOLD_BY_REPLICAS else "sum"
    by = ", ".join(row.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in row.labels) or row.name.removeprefix("penstock_")
    title = row.name.removeprefix("penstock_").removesuffix("_total").replace("_", " ")
    grouped = f"{combine} by ({by})" if by else combine
    if row.kind == "gauge":
        return Panel(title.capitalize(), (Query(f"{grouped} ({row.name})", legend),), unit_of(row), row.help)
    if row.kind == "counter":
        queries = (Query(f"{grouped} (rate({row.name}{RATE}))", legend),)
        return Panel(f"{title.capitalize()} a second", queries, unit_of(row), row.help)
    return Panel(title.capitalize(), _quantiles(row, legend), unit_of(row), row.help)


def _quantiles(row: Metric, legend: str, quantiles: Sequence[float] = QUANTILES) -> tuple[Query, ...]:
    inside = f"sum by ({', '.join(('le', *row.labels))}) (rate({row.name}_bucket{RATE}))"
    return tuple(Query(f"histogram_quantile({q:g}, {inside})", f"p{100 * q:g} {legend}") for q in quantiles)


def _of(*names: str) -> tuple[Panel, ...]:
    """Panels of these metrics."""
    rows = {row.name: row for row in TABLE}
    return tuple(shown(rows[name]) for name in names)


def _ratio(title: str, above: str, below: str, by: str, description: str, combine: str = "sum") -> Panel:
    """The quotient of two counters' rates."""
    parts = [f"{combine} by ({by}) (rate({each}{RATE}))" for each in (above, below)]
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Panel(title, (Query(" / ".join(parts), legend),), "percentunit", description)


REQUESTS = Panel(
    "Requests a second",
    (Query(f"sum by (model, code) (rate(penstock_requests_total{RATE}))", "{{model}} {{code}}"),),
    "reqps",
    "By the model asked for and the HTTP status.",
)
GOODPUT = Panel(
    "Requests in target",
    (
        Query(
            f'sum by (model) (rate(penstock_slo_requests_total{{outcome="met"}}{RATE}))'
            f" / sum by (model) (rate(penstock_slo_requests_total{RATE}))",
            "{{model}}",
        ),
    ),
    "percentunit",
    "Share of the finished requests that met the targets of their class.",
)
REPLICAS = Panel(
    "Replicas",
    (
        Query("max by (pool) (penstock_replicas)", "{{pool}}"),
        Query("max by (pool) (penstock_replicas_wanted or penstock_autoscale_target)", "{{pool}} wanted"),
    ),
    "short",
    "Replicas that gateways can route to, and those that the configuration or the autoscaler wants.",
)
KV_USE = Panel(
    "KV memory in use",
    (Query("1 - max by (pool) (penstock_kv_blocks_free) / max by (pool) (penstock_kv_blocks)", "{{pool}}"),),
    "percentunit",
    "Blocks of running sequences; what is only kept for later counts as free.",
)
TTFT = Panel(
    "Time to first token, p99",
    (Query(f"histogram_quantile(0.99, sum by (le, model) (rate(penstock_ttft_seconds_bucket{RATE})))", "{{model}}"),),
    "s",
)
TPOT = Panel(
    "Time per further token, p95",
    (Query(f"histogram_quantile(0.95, sum by (le, model) (rate(penstock_tpot_seconds_bucket{RATE})))", "{{model}}"),),
    "s",
)
REFUSED = Panel(
    "Refused",
    (
        Query(
            f'sum by (model) (rate(penstock_requests_total{{code=~"502|503|504"}}{RATE}))'
            f" / sum by (model) (rate(penstock_requests_total{RATE}))",
            "{{model}}",
        ),
    ),
    "percentunit",
    "Share of requests that ended with 502, 503 or 504; a tenant's own limit is 429.",
)
BURN = Panel(
    "Burn rate of the error budget",
    tuple(
        Query(f"max by (model, class) (penstock:slo_burn:rate{window})", f"{{{{model}}}} {{{{class}}}} {window}")
        for window in ("5m", "1h", "6h", "3d")
    ),
    "short",
    "1 spends exactly the budget; 14.4 over an hour and 6 over six hours wake somebody.",
)

OVERVIEW = Board(
    "overview",
    "Penstock: overview",
    (
        Section("Is everybody served?", (REQUESTS, GOODPUT, REFUSED, TTFT, TPOT, *_of("penstock_tokens_total"))),
        Section(
            "Is there room?",
            (
                REPLICAS,
                *_of("penstock_queue_length"),
                KV_USE,
                Panel(
                    "Waiting for a replica, p99",
                    (
                        Query(
                            f"histogram_quantile(0.99, sum by (le, model) (rate(penstock_queue_seconds_bucket{RATE})))",
                            "{{model}}",
                        ),
                    ),
                    "s",
                ),
                *_of("penstock_route_attempts_total", "penstock_tier_decisions_total"),
            ),
        ),
        Section(
            "Is everything well that is needed?",
            _of(
                "penstock_redis_away",
                "penstock_redis_losses_total",
                "penstock_provider_breaker_open",
                "penstock_provider_requests_total",
                "penstock_client_disconnects_total",
                "penstock_slow_clients_total",
                "penstock_ignored_fields_total",
                "penstock_spans_total",
            ),
        ),
        Section("Batches", _of("penstock_batches_running", "penstock_batch_lines_total")),
    ),
    ("penstock_provider_", "penstock_redis_", "penstock_batch", "penstock_escalation", "penstock_tier"),
)
SLOS = Board(
    "slos",
    "Penstock: targets",
    (
        Section(
            "Error budgets",
            (
                BURN,
                Panel(
                    "Requests in target, by class and tier",
                    (
                        Query(
                            f'sum by (model, class, tier) (rate(penstock_slo_requests_total{{outcome="met"}}{RATE}))'
                            f" / sum by (model, class, tier) (rate(penstock_slo_requests_total{RATE}))",
                            "{{model}} {{class}} {{tier}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "What was missed",
                    (
                        Query(
                            "sum by (model, class, outcome)"
                            f' (rate(penstock_slo_requests_total{{outcome!="met"}}{RATE}))',
                            "{{model}} {{class}} {{outcome}}",
                        ),
                    ),
                    "reqps",
                    "By the first target that was missed; failed: no answer to the end.",
                ),
                Panel(
                    "Goodput: requests in target",
                    (
                        Query(
                            "sum by (model, class, tier) (penstock:goodput_requests:rate5m)",
                            "{{model}} {{class}} {{tier}}",
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Goodput: output tokens of requests in target",
                    (
                        Query(
                            "sum by (model, class, tier) (penstock:goodput_tokens:rate5m)",
                            "{{model}} {{class}} {{tier}}",
                        ),
                    ),
                    "cps",
                ),
                *_of("penstock_slo_objective"),
            ),
        ),
        Section(
            "Times",
            _of(
                "penstock_ttft_seconds",
                "penstock_tpot_seconds",
                "penstock_queue_seconds",
                "penstock_request_seconds",
                "penstock_ttft_prediction_ratio",
            ),
        ),
        Section("By tenant", _of("penstock_tenant_slo_requests_total")),
    ),
    ("penstock_slo_", "penstock_tenant_slo_", "penstock_ttft_", "penstock_tpot_"),
)
POOLS = Board(
    "pools",
    "Penstock: pools and replicas",
    (
        Section(
            "Replicas",
            (
                REPLICAS,
                *_of("penstock_replicas", "penstock_replicas_wanted"),
                *_of("penstock_running_sequences", "penstock_waiting_sequences", "penstock_queue_length"),
            ),
        ),
        Section("KV memory", (KV_USE, *_of("penstock_kv_blocks", "penstock_kv_blocks_free"))),
        Section(
            "Speculation and kernels",
            (
                _ratio(
                    "Draft tokens accepted",
                    "penstock_accepted_draft_tokens_total",
                    "penstock_draft_tokens_total",
                    "pool",
                    "Drafts that were what the model says.",
                    "max",
                ),
                *_of("penstock_draft_tokens_total", "penstock_compiled_kernels_total"),
            ),
        ),
    ),
    ("penstock_replica", "penstock_kv_", "penstock_running", "penstock_waiting", "penstock_step"),
)
CACHE = Board(
    "cache",
    "Penstock: prefix cache and adapters",
    (
        Section(
            "Prefix cache",
            (
                _ratio(
                    "Prompt tokens found in a cache",
                    "penstock_prefix_hit_tokens_total",
                    "penstock_prefix_lookup_tokens_total",
                    "model",
                    "Share of the tokens that were looked up.",
                ),
                _ratio(
                    "Precision of the index",
                    "penstock_prefix_true_tokens_total",
                    "penstock_prefix_predicted_tokens_total",
                    "model",
                    "Of the tokens that the index promised, those that the replica had.",
                ),
                _ratio(
                    "Recall of the index",
                    "penstock_prefix_true_tokens_total",
                    "penstock_prefix_hit_tokens_total",
                    "model",
                    "Of the tokens that the replica had, those that the index promised.",
                ),
                *_of("penstock_index_blocks", "penstock_index_gaps_total"),
            ),
        ),
        Section(
            "Adapters",
            (
                _ratio(
                    "Adapters found in a slot",
                    'penstock_adapter_uses_total{outcome="hit"}',
                    "penstock_adapter_uses_total",
                    "pool",
                    "The other sequences waited until theirs was loaded.",
                    "max",
                ),
                *_of("penstock_adapter_uses_total", "penstock_adapter_loads_total", "penstock_adapter_evictions_total"),
            ),
        ),
    ),
    ("penstock_prefix_", "penstock_index_", "penstock_adapter_"),
)
TENANTS = Board(
    "tenants",
    "Penstock: tenants and cost",
    (
        Section(
            "Limits",
            _of("penstock_rate_limited_total", "penstock_tenant_slo_requests_total"),
        ),
        Section(
            "Budgets",
            _of("penstock_budget_used_ratio", "penstock_provider_cap_used_ratio", "penstock_budget_refusals_total"),
        ),
        Section("Money", _of("penstock_provider_cost_total")),
    ),
    ("penstock_cost_", "penstock_charge_", "penstock_budget_", "penstock_tenant_", "penstock_provider_cap_"),
)
AUTOSCALER = Board(
    "autoscaler",
    "Penstock: autoscaler",
    (
        Section(
            "What it decides",
            (REPLICAS, *_of("penstock_autoscale_target", "penstock_autoscale_decisions_total")),
        ),
        Section(
            "What it sees",
            (
                *_of("penstock_queue_length", "penstock_running_sequences"),
                REQUESTS,
                TTFT,
            ),
        ),
        Section("On Kubernetes", _of("penstock_autoscaler_is_leader", "penstock_kubernetes_calls_total")),
    ),
    ("penstock_autoscale", "penstock_kubernetes_"),
)


def boards() -> tuple[Board, ...]:
    """All dashboards, with what no panel names at the end of the board whose prefix it has. Raises ValueError for a
    metric that no board has a place for."""
    written = (OVERVIEW, SLOS, POOLS, CACHE, TENANTS, AUTOSCALER)
    left = [row for row in TABLE if row.name not in named(panel for board in written for panel in panels(board))]
    homeless = [row.name for row in left if not any(row.name.startswith(board.prefixes) for board in written)]
    if homeless:
        raise ValueError(f"no dashboard shows {', '.join(homeless)}: give a board of deploy/dashboards a panel of it")
    return tuple(_with(board, [row for row in left if row.name.startswith(board.prefixes)]) for board in written)


def panels(board: Board) -> list[Panel]:
    return [panel for section in board.sections for panel in section.panels]


def named(found: Iterable[Panel]) -> set[str]:
    """Metrics that the panels' expressions name."""
    return {
        without_suffix(each.name) for panel in found for query in panel.queries for each in series(query.expression)
    }


def _with(board: Board, rows: Sequence[Metric]) -> Board:
    if not rows:
        return board
    return board._replace(sections=(*board.sections, Section(REST, tuple(shown(row) for row in rows))))
