"""The alerts: name, expression, how long it must hold, how urgent it is, and what it means in a sentence.

What to do about each stands in docs/alerts.md under its name. Severity `critical` is for somebody to be woken by,
`warning` for the next day. Thresholds are constants here; those of burn rates are the SRE workbook's. Expressions are
in the short form of `promql`, and group by installation, so one set of rules serves several.
"""

from typing import Literal, NamedTuple

LEAST_MISSED = 10
"""Requests out of target below which a window raises no alarm: of two requests in a quiet hour one may fail."""
MOST_REFUSED = 0.01
"""Share of requests that may be answered with 502, 503 or 504."""
FULL_KV = 0.95
"""Share of KV blocks in use from which a pool counts as full."""
LEAST_PRECISION = 0.9
"""Share of the prompt tokens that the index promised and the replica had."""
LEAST_PREDICTED = 10_000
"""Tokens that the index must have promised in the window before its precision says something."""
MOST_GAPS = 5
"""Gaps in ten minutes that reconnections explain."""
MOST_WAITS = 0.5
"""Share of sequences with adapters that may wait until theirs is loaded."""
MOST_API_ERRORS = 0.1
"""Share of the autoscaler's calls to Kubernetes that may fail."""
NEARLY_USED = 0.9
"""Part of a month's budget or cap from which somebody should know."""
OFF_BY = 2.0
"""Factor between the real and the predicted time to first token, of the median request."""
LEAST_COMPARED = 50
"""Requests whose prediction is compared, at least."""
REMEMBERED = "1d"
"""Time for which an installation that answers no more is known by its last series; then its alerts end."""

WANTED = "max by (@, pool) (penstock_replicas_wanted or penstock_autoscale_target)"
REPLICAS = "max by (@, pool) (penstock_replicas)"
DECISIONS = "penstock_autoscale_decisions_total"


class Alert(NamedTuple):
    """A row of the table."""

    name: str
    group: str
    severity: Literal["critical", "warning"]
    lasting: str
    """Time for which the expression must hold, such as 5m; empty: none."""
    expression: str
    summary: str
    """Line for a pager; Prometheus puts labels and the value in."""
    meaning: str
    """Sentence for docs/alerts.md and the alert's description."""


def _burn(name: str, severity: Literal["critical", "warning"], factor: float, long: str, short: str) -> Alert:
    """The alert of one pair of windows: the long one says that it matters, the short one that it goes on."""
    return Alert(
        name,
        "slo",
        severity,
        "",
        f"penstock:slo_burn:rate{long} > {factor:g} and penstock:slo_burn:rate{short} > {factor:g}"
        f" and penstock:slo_missed:increase{long} >= {LEAST_MISSED}",
        "{{ $labels.model }}, {{ $labels.class }}: the error budget burns {{ $value | humanize }} times as fast as it"
        " may",
        f"Requests of a model and a class miss their target so often that {factor:g} times the error budget is spent,"
        f" over {long} and over the last {short}.",
    )


def _deciding(reasons: str, window: str = "10m") -> str:
    """Expression of the share of the autoscaler's decisions that have one of the reasons, where it is above a half."""
    return (
        f'sum by (@, pool) (rate({DECISIONS}{{reason=~"{reasons}"}}[{window}]))'
        f" / sum by (@, pool) (rate({DECISIONS}[{window}])) > 0.5"
    )


SLO = (
    _burn("PenstockSloBurnFast", "critical", 14.4, "1h", "5m"),
    _burn("PenstockSloBurnSlow", "critical", 6, "6h", "30m"),
    _burn("PenstockSloBurnLong", "warning", 1, "3d", "6h"),
    Alert(
        "PenstockPredictionOff",
        "slo",
        "warning",
        "15m",
        "(histogram_quantile(0.5, sum by (@, model, le) (rate(penstock_ttft_prediction_ratio_bucket[30m])))"
        f" > {OFF_BY:g} or histogram_quantile(0.5, sum by (@, model, le)"
        f" (rate(penstock_ttft_prediction_ratio_bucket[30m]))) < {1 / OFF_BY:g})"
        " and sum by (@, model) (increase(penstock_ttft_prediction_ratio_count[30m]))"
        f" >= {LEAST_COMPARED}",
        "{{ $labels.model }}: first tokens take {{ $value | humanize }} times what was predicted",
        f"The median time to first token is more than {OFF_BY:g} times the predicted one, or less than half of it:"
        " routing and scaling decide by wrong figures.",
    ),
)
CAPACITY = (
    Alert(
        "PenstockNoGateway",
        "capacity",
        "critical",
        "1m",
        f"count by (@) (last_over_time(penstock_replicas[{REMEMBERED}]))"
        " unless on (@) count by (@) (penstock_replicas)",
        "{{ $labels.job }}: no gateway answers",
        "No gateway of an installation that had one within the last day answers Prometheus: nobody is served.",
    ),
    Alert(
        "PenstockGatewayDown",
        "capacity",
        "warning",
        "2m",
        f"up == 0 and on (@) count by (@) (last_over_time(penstock_batches_running[{REMEMBERED}]))",
        "{{ $labels.job }}: {{ $labels.instance }} does not answer",
        "A gateway or an autoscaler that Prometheus should be answered by does not answer.",
    ),
    Alert(
        "PenstockNoReplica",
        "capacity",
        "critical",
        "1m",
        f"{REPLICAS} == 0 and {WANTED} > 0",
        "{{ $labels.pool }}: no replica serves",
        "No gateway has a replica of a pool that should have one: its requests wait, or go to another tier.",
    ),
    Alert(
        "PenstockReplicasMissing",
        "capacity",
        "warning",
        "15m",
        f"{WANTED} - {REPLICAS} > 0",
        "{{ $labels.pool }}: {{ $value }} replicas fewer than wanted",
        "A pool has had fewer replicas than it should for longer than a start takes.",
    ),
    Alert(
        "PenstockRefusing",
        "capacity",
        "critical",
        "2m",
        'sum by (@, model) (rate(penstock_requests_total{code=~"502|503|504"}[5m]))'
        f" / sum by (@, model) (rate(penstock_requests_total[5m])) > {MOST_REFUSED:g}"
        ' and sum by (@, model) (increase(penstock_requests_total{code=~"502|503|504"}[5m]))'
        f" >= {LEAST_MISSED}",
        "{{ $labels.model }}: {{ $value | humanizePercentage }} of the requests are refused",
        f"More than {MOST_REFUSED:.0%} of a model's requests end with 502, 503 or 504: the queue is full, no replica is"
        " left in time, or a deadline has passed.",
    ),
    Alert(
        "PenstockFaults",
        "capacity",
        "warning",
        "",
        'sum by (@, model) (increase(penstock_requests_total{code="500"}[15m])) > 0',
        "{{ $labels.model }}: requests have ended with status 500",
        "Requests have ended with status 500, which says that an engine or the gateway has failed, not that there was"
        " too much to do.",
    ),
    Alert(
        "PenstockQueueStays",
        "capacity",
        "warning",
        "10m",
        "sum by (@, pool) (min_over_time(penstock_queue_length[5m])) > 0",
        "{{ $labels.pool }}: {{ $value }} requests or more have waited at any time",
        "The queue for a pool has not been empty for a quarter of an hour: more comes than its replicas take.",
    ),
    Alert(
        "PenstockKvFull",
        "capacity",
        "warning",
        "5m",
        "1 - max by (@, pool) (penstock_kv_blocks_free) / max by (@, pool) (penstock_kv_blocks)"
        f" > {FULL_KV:g} and (max by (@, pool) (penstock_waiting_sequences) > 0"
        " or sum by (@, pool) (penstock_queue_length) > 0)",
        "{{ $labels.pool }}: {{ $value | humanizePercentage }} of the KV memory is in use, and sequences wait",
        f"More than {FULL_KV:.0%} of a pool's KV blocks hold running sequences, and others wait.",
    ),
    Alert(
        "PenstockKernelsCompiled",
        "capacity",
        "warning",
        "",
        "max by (@, pool) (increase(penstock_compiled_kernels_total[15m])) > 0",
        "{{ $labels.pool }}: kernels are compiled while requests wait",
        "Replicas on GPUs compile kernels after they were ready, which stops every sequence of theirs for seconds.",
    ),
)
AUTOSCALER = (
    Alert(
        "PenstockAutoscalerAtMaximum",
        "autoscaler",
        "warning",
        "5m",
        _deciding("full"),
        "{{ $labels.pool }}: needs more replicas than max_replicas",
        "More than half of the autoscaler's looks at a pool say that it needs more replicas than `max_replicas`.",
    ),
    Alert(
        "PenstockAutoscalerNoRoom",
        "autoscaler",
        "warning",
        "5m",
        _deciding("shortage|budget"),
        "{{ $labels.pool }}: the cluster or the budget has no room for the replicas it needs",
        "More than half of the autoscaler's looks at a pool say that no node, no quota or no `autoscale_budget` is"
        " left.",
    ),
    Alert(
        "PenstockAutoscalerBlind",
        "autoscaler",
        "warning",
        "5m",
        _deciding("stale|unknown"),
        "{{ $labels.pool }}: the autoscaler does not know the load",
        "More than half of the autoscaler's looks at a pool found no fresh report of the gateways, or too little to"
        " know the load: targets stay as they are.",
    ),
    Alert(
        "PenstockAutoscalerSilent",
        "autoscaler",
        "critical",
        "1m",
        f"sum by (@, pool) (rate({DECISIONS}[5m])) == 0 unless on (@) max by (@) (penstock_redis_away) > 0",
        "{{ $labels.pool }}: the autoscaler decides nothing",
        "The autoscaler has not looked at a pool for five minutes, although Redis, by which it tells gateways of its"
        " decisions, is there.",
    ),
    Alert(
        "PenstockAutoscalerNoLeader",
        "autoscaler",
        "critical",
        "2m",
        "sum by (namespace, lease) (penstock_autoscaler_is_leader) != 1",
        "{{ $labels.lease }}: {{ $value }} autoscalers hold the Lease",
        "No autoscaler holds the Lease, or more than one says so (Kubernetes).",
    ),
    Alert(
        "PenstockKubernetesApiFails",
        "autoscaler",
        "warning",
        "5m",
        'sum by (@) (rate(penstock_kubernetes_calls_total{code=~"away|401|403|5.."}[10m]))'
        f" / sum by (@) (rate(penstock_kubernetes_calls_total[10m])) > {MOST_API_ERRORS:g}",
        "{{ $labels.job }}: {{ $value | humanizePercentage }} of the calls to the Kubernetes API fail",
        f"More than {MOST_API_ERRORS:.0%} of the autoscaler's calls to the Kubernetes API are refused or stay without"
        " an answer.",
    ),
)
REST = (
    Alert(
        "PenstockProviderBreakerOpen",
        "providers",
        "warning",
        "1m",
        "max by (@, provider) (penstock_provider_breaker_open) > 0",
        "{{ $labels.provider }}: not asked any more, because it fails",
        "A provider has failed so often that a gateway has stopped asking it, and no trial has succeeded since.",
    ),
    Alert(
        "PenstockIndexGaps",
        "index",
        "warning",
        "",
        f"sum by (@, pool) (increase(penstock_index_gaps_total[10m])) > {MOST_GAPS}",
        "{{ $labels.pool }}: {{ $value | humanize }} gaps in the block events within ten minutes",
        "Gateways keep missing block events of a pool's replicas, and ask for snapshots, which cost both of them time.",
    ),
    Alert(
        "PenstockIndexImprecise",
        "index",
        "warning",
        "15m",
        "sum by (@, model) (rate(penstock_prefix_true_tokens_total[30m]))"
        f" / sum by (@, model) (rate(penstock_prefix_predicted_tokens_total[30m])) < {LEAST_PRECISION:g}"
        " and sum by (@, model) (increase(penstock_prefix_predicted_tokens_total[30m]))"
        f" >= {LEAST_PREDICTED}",
        "{{ $labels.model }}: {{ $value | humanizePercentage }} of the promised tokens were in the cache",
        f"Less than {LEAST_PRECISION:.0%} of the prompt tokens that the prefix index said a replica held were there.",
    ),
    Alert(
        "PenstockAdapterWaits",
        "index",
        "warning",
        "15m",
        'sum by (@, pool) (rate(penstock_adapter_uses_total{outcome="wait"}[10m]))'
        f" / sum by (@, pool) (rate(penstock_adapter_uses_total[10m])) > {MOST_WAITS:g}",
        "{{ $labels.pool }}: {{ $value | humanizePercentage }} of the sequences wait for their adapter",
        "More than half of the sequences with an adapter wait until it is loaded: there are fewer slots than adapters"
        " in use.",
    ),
    Alert(
        "PenstockRedisAway",
        "redis",
        "critical",
        "30s",
        "max by (@) (penstock_redis_away) > 0",
        "{{ $labels.job }}: Redis does not answer",
        "A gateway gets no answer from Redis. Streams go on; limits, usage, new tenants and the autoscaler do not.",
    ),
    Alert(
        "PenstockRedisLostData",
        "redis",
        "critical",
        "",
        "sum by (@) (increase(penstock_redis_losses_total[1h])) > 0",
        "{{ $labels.job }}: Redis came back without its data",
        "Redis was found without the data that it had before: tenants, keys and usage are gone.",
    ),
)
BUDGETS = (
    Alert(
        "PenstockBudgetNearlyUsed",
        "budgets",
        "warning",
        "5m",
        f"max by (@, tenant) (penstock_budget_used_ratio) > {NEARLY_USED:g}",
        "{{ $labels.tenant }}: {{ $value | humanizePercentage }} of the month's budget is used",
        f"A tenant has spent or reserved more than {NEARLY_USED:.0%} of its budget of the month; at 100% it gets 429.",
    ),
    Alert(
        "PenstockProviderCapNearlyUsed",
        "budgets",
        "warning",
        "5m",
        f"max by (@, provider) (penstock_provider_cap_used_ratio) > {NEARLY_USED:g}",
        "{{ $labels.provider }}: {{ $value | humanizePercentage }} of the month's cap is used",
        f"A provider, or all of them together, has cost or reserved more than {NEARLY_USED:.0%} of what it may cost in"
        " the month; at 100% it is asked no more.",
    ),
)
ALERTS: tuple[Alert, ...] = (*SLO, *CAPACITY, *AUTOSCALER, *REST, *BUDGETS)
