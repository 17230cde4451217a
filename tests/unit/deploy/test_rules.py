"""Prometheus' rules on series that are made up: what burns fires, what is quiet does not. Needs promtool."""

from pathlib import Path
from typing import Any

import pytest

from deploy.dashboards import rules
from deploy.dashboards.alerts import ALERTS
from deploy.dashboards.outputs import RULES
from tests.unit.deploy.prometheus import Case, check_rules, promtool, try_rules

MODEL = {"namespace": "llm", "job": "gateways", "model": "m", "class": "standard"}
POOL = {"namespace": "llm", "job": "gateways", "pool": "p"}
BURNS = ("PenstockSloBurnFast", "PenstockSloBurnSlow", "PenstockSloBurnLong")
SITE = {"namespace": "llm", "job": "gateways"}


def written(name: str, labels: dict[str, str], **more: str) -> str:
    inside = ", ".join(f'{label}="{value}"' for label, value in (labels | more).items())
    return f"{name}{{{inside}}}"


def slo(met: str, missed: str, outcome: str = "ttft", objective: str = "0.99x600") -> dict[str, str]:
    """Requests by outcome, in promtool's notation of values."""
    name = "penstock_slo_requests_total"
    return {
        written(name, MODEL, tier="cloud", outcome="met"): met,
        written(name, MODEL, tier="cloud", outcome=outcome): missed,
        written("penstock_slo_objective", SITE): objective,
    }


BURNING = {
    "no traffic at all": Case(slo("0x400", "0x400"), {"10m": {}, "2h": {}}),
    "nothing missed": Case(slo("0+600x400", "0x400"), {"10m": {}, "2h": {}}),
    "half of the budget": Case(slo("0+995x400", "0+5x400"), {"1h": {}, "2h": {}}),
    "sixteen requests in all, half of them missed": Case(slo("0+1x8 8x400", "0+1x8 8x400"), {"8m": {}, "3h": {}}),
    "all is well for four hours, then everything is missed": Case(
        slo("0+1000x240 240000x60", "0x240 0+1000x60"),
        {
            "4h1m": {},
            "4h12m": {"PenstockSloBurnFast": [MODEL], "PenstockSloBurnLong": [MODEL]},
            "4h40m": {name: [MODEL] for name in BURNS},
        },
    ),
    "a tenth is missed": Case(
        slo("0+900x200", "0+100x200"), {"3h": {"PenstockSloBurnSlow": [MODEL], "PenstockSloBurnLong": [MODEL]}}
    ),
    "two of a hundred are missed": Case(slo("0+980x400", "0+20x400"), {"2h": {"PenstockSloBurnLong": [MODEL]}}),
    "failed requests burn as late ones do": Case(
        slo("0x200", "0+50x200", "failed"), {"2h": {name: [MODEL] for name in BURNS}}
    ),
    "an objective of 0.9 takes ten times as much": Case(
        slo("0+910x400", "0+90x400", objective="0.9x400"), {"1h": {}, "2h": {}}
    ),
    "an hour in which everything is missed, and all is well again": Case(
        slo("0+1000x60 60000x60 60000+1000x400", "0x60 0+1000x60 60000x400"),
        {
            "1h55m": {name: [MODEL] for name in BURNS},
            # the last five minutes are well, half an hour is not yet, six hours are long
            "2h8m": {"PenstockSloBurnSlow": [MODEL], "PenstockSloBurnLong": [MODEL]},
            "2h40m": {"PenstockSloBurnLong": [MODEL]},
            "8h20m": {},
        },
    ),
}


def gauge(name: str, labels: dict[str, str], values: str, **more: str) -> dict[str, str]:
    return {written(name, labels, **more): values}


DECISIONS = "penstock_autoscale_decisions_total"
OTHERS = {
    "replicas as they should be": Case(
        gauge("penstock_replicas", POOL, "2x60", tier="cloud") | gauge("penstock_replicas_wanted", POOL, "2x60"),
        {"30m": {}},
    ),
    "a pool at zero that nobody wants": Case(
        gauge("penstock_replicas", POOL, "0x60", tier="edge") | gauge("penstock_autoscale_target", POOL, "0x60"),
        {"30m": {}},
    ),
    "one of two replicas is gone for twenty minutes": Case(
        gauge("penstock_replicas", POOL, "2x9 1x20 2x30", tier="cloud")
        | gauge("penstock_replicas_wanted", POOL, "2x60"),
        {"20m": {}, "28m": {"PenstockReplicasMissing": [POOL]}, "32m": {}},
    ),
    "no replica, though one is wanted": Case(
        gauge("penstock_replicas", POOL, "1x9 0x20", tier="cloud") | gauge("penstock_autoscale_target", POOL, "1x60"),
        {
            "10m": {},
            "12m": {"PenstockNoReplica": [POOL]},
            "28m": {"PenstockNoReplica": [POOL], "PenstockReplicasMissing": [POOL]},
        },
    ),
    "what one gateway of two has lost, the other has": Case(
        gauge("penstock_replicas", POOL, "0x60", tier="cloud", instance="a")
        | gauge("penstock_replicas", POOL, "1x60", tier="cloud", instance="b")
        | gauge("penstock_replicas_wanted", POOL, "1x60", instance="a"),
        {"30m": {}},
    ),
    "gateways that went": Case(
        gauge("penstock_replicas", POOL, "1x10 stale", tier="cloud", instance="a"),
        {
            "10m": {},
            "13m": {"PenstockNoGateway": [SITE]},
            "20h": {"PenstockNoGateway": [SITE]},
            "1455m": {},  # a day later
        },
    ),
    "a process that does not answer": Case(
        gauge("up", SITE, "1x10 0x120", instance="a")
        | gauge("penstock_batches_running", SITE, "0x10", instance="a")
        | gauge("up", {"namespace": "llm", "job": "another"}, "0x60", instance="b"),
        {name: {"PenstockGatewayDown": [SITE | {"instance": "a"}]} for name in ("14m", "120m")} | {"10m": {}},
    ),
    "refusals": Case(
        gauge("penstock_requests_total", SITE, "0+98x60", model="m", code="200")
        | gauge("penstock_requests_total", SITE, "0x20 0+3x40", model="m", code="503")
        | gauge("penstock_requests_total", SITE, "0+50x60", model="m", code="429"),
        {"20m": {}, "50m": {"PenstockRefusing": [SITE | {"model": "m"}]}},
    ),
    "a tenant's own limit is no refusal": Case(
        gauge("penstock_requests_total", SITE, "0+10x60", model="m", code="200")
        | gauge("penstock_requests_total", SITE, "0+50x60", model="m", code="429"),
        {"30m": {}},
    ),
    "an engine that failed": Case(
        # of a gateway that is there from the fifth minute on, and first asked when the engine fails
        gauge("penstock_requests_total", SITE, "_x5 0x75", model="m", code="200", instance="a")
        | gauge("penstock_requests_total", SITE, "_x5 0x14 1x60", model="m", code="500", instance="a")
        | gauge("penstock_requests_total", SITE, "_x5 0x75", model="m", code="503", instance="a"),
        {"19m": {}, "25m": {"PenstockFaults": [SITE | {"model": "m"}]}, "40m": {}},
    ),
    "a queue that comes and goes": Case(
        gauge("penstock_queue_length", POOL, "5 9 3 0 5 7 1 0x40"),
        {"20m": {}, "30m": {}},
    ),
    "a queue that stays": Case(
        gauge("penstock_queue_length", POOL, "5x60"),
        {"9m": {}, "20m": {"PenstockQueueStays": [POOL]}},
    ),
    "KV memory full, and sequences wait": Case(
        gauge("penstock_kv_blocks", POOL, "100x60")
        | gauge("penstock_kv_blocks_free", POOL, "1x60")
        | gauge("penstock_waiting_sequences", POOL, "0x20 3x20 0x20"),
        {"20m": {}, "30m": {"PenstockKvFull": [POOL]}, "45m": {}},
    ),
    "KV memory full, and requests wait in a gateway": Case(
        gauge("penstock_kv_blocks", POOL, "100x60")
        | gauge("penstock_kv_blocks_free", POOL, "1x60")
        | gauge("penstock_waiting_sequences", POOL, "0x60")
        | gauge("penstock_queue_length", POOL, "0x20 3x8 0x30", instance="a"),
        {"20m": {}, "28m": {"PenstockKvFull": [POOL]}, "45m": {}},
    ),
    "kernels compiled": Case(
        gauge("penstock_compiled_kernels_total", POOL, "_x5 0x4 1x60", instance="a")
        | gauge("penstock_compiled_kernels_total", POOL | {"pool": "q"}, "_x5 0x64", instance="a"),
        {"9m": {}, "15m": {"PenstockKernelsCompiled": [POOL]}, "40m": {}},
    ),
    "an autoscaler that is content": Case(
        gauge(DECISIONS, POOL, "0+60x60", reason="steady") | gauge(DECISIONS, POOL, "0+2x60", reason="full"),
        {"30m": {}},
    ),
    "an autoscaler at its maximum": Case(
        gauge(DECISIONS, POOL, "0+60x20 1200x40", reason="steady")
        | gauge(DECISIONS, POOL, "0x20 0+60x40", reason="full"),
        {"20m": {}, "40m": {"PenstockAutoscalerAtMaximum": [POOL]}},
    ),
    "no room in the cluster": Case(
        gauge(DECISIONS, POOL, "0+60x60", reason="shortage"),
        {"30m": {"PenstockAutoscalerNoRoom": [POOL]}},
    ),
    "a blind autoscaler": Case(
        gauge(DECISIONS, POOL, "0+60x60", reason="stale"),
        {"30m": {"PenstockAutoscalerBlind": [POOL]}},
    ),
    "an autoscaler that ended": Case(
        gauge(DECISIONS, POOL, "0+60x20 1200x40", reason="steady") | gauge("penstock_redis_away", SITE, "0x60"),
        {"20m": {}, "30m": {"PenstockAutoscalerSilent": [POOL]}},
    ),
    "an autoscaler that is not heard because Redis is away": Case(
        gauge(DECISIONS, POOL, "0+60x20 1200x40", reason="steady") | gauge("penstock_redis_away", SITE, "0x20 1x40"),
        {"20m": {}, "30m": {"PenstockRedisAway": [SITE]}},
    ),
    "one leader of two autoscalers": Case(
        gauge("penstock_autoscaler_is_leader", {"namespace": "llm"}, "1x60", lease="l", pod="a")
        | gauge("penstock_autoscaler_is_leader", {"namespace": "llm"}, "0x60", lease="l", pod="b"),
        {"30m": {}},
    ),
    "no leader": Case(
        gauge("penstock_autoscaler_is_leader", {"namespace": "llm"}, "1x10 0x60", lease="l", pod="a")
        | gauge("penstock_autoscaler_is_leader", {"namespace": "llm"}, "0x60", lease="l", pod="b"),
        {"10m": {}, "20m": {"PenstockAutoscalerNoLeader": [{"namespace": "llm", "lease": "l"}]}},
    ),
    "Kubernetes refuses the autoscaler": Case(
        gauge("penstock_kubernetes_calls_total", SITE, "0+60x60", verb="get", resource="pods", code="200")
        | gauge("penstock_kubernetes_calls_total", SITE, "0+60x60", verb="patch", resource="rayclusters", code="403"),
        {"30m": {"PenstockKubernetesApiFails": [SITE]}},
    ),
    "a conflict is no failure": Case(
        gauge("penstock_kubernetes_calls_total", SITE, "0+60x60", verb="patch", resource="rayclusters", code="409"),
        {"30m": {}},
    ),
    "a provider's breaker opens and closes": Case(
        gauge("penstock_provider_breaker_open", SITE, "0x10 1x10 0x10", provider="far"),
        {"10m": {}, "15m": {"PenstockProviderBreakerOpen": [SITE | {"provider": "far"}]}, "25m": {}},
    ),
    "a gap after a reconnection": Case(gauge("penstock_index_gaps_total", POOL, "0x10 2x50"), {"12m": {}}),
    "gaps again and again": Case(
        gauge("penstock_index_gaps_total", POOL, "0x10 0+2x50"),
        {"10m": {}, "30m": {"PenstockIndexGaps": [POOL]}},
    ),
    "an index that promises too much": Case(
        gauge("penstock_prefix_predicted_tokens_total", SITE, "0+1000x90", model="m")
        | gauge("penstock_prefix_true_tokens_total", SITE, "0+800x90", model="m"),
        {"10m": {}, "60m": {"PenstockIndexImprecise": [SITE | {"model": "m"}]}},
    ),
    "an index that promises little": Case(
        gauge("penstock_prefix_predicted_tokens_total", SITE, "0+10x90", model="m")
        | gauge("penstock_prefix_true_tokens_total", SITE, "0+1x90", model="m"),
        {"60m": {}},
    ),
    "adapters that wait": Case(
        gauge("penstock_adapter_uses_total", POOL, "0+10x90", outcome="hit")
        | gauge("penstock_adapter_uses_total", POOL, "0+30x90", outcome="wait"),
        {"10m": {}, "40m": {"PenstockAdapterWaits": [POOL]}},
    ),
    "Redis away for a look": Case(
        gauge("penstock_redis_away", SITE, "0x10 1x10 0x10"),
        {"10m": {}, "15m": {"PenstockRedisAway": [SITE]}, "25m": {}},
    ),
    "Redis came back empty": Case(
        gauge("penstock_redis_losses_total", SITE, "0x10 1x120"),
        {"10m": {}, "15m": {"PenstockRedisLostData": [SITE]}, "100m": {}},
    ),
    "a budget that is nearly used up, and one that is not": Case(
        gauge("penstock_budget_used_ratio", SITE, "0.5x9 0.95x20 0.1x20", tenant="acme")
        | gauge("penstock_budget_used_ratio", SITE, "0.5x50", tenant="other"),
        {"10m": {}, "20m": {"PenstockBudgetNearlyUsed": [SITE | {"tenant": "acme"}]}, "40m": {}},
    ),
    "a cap that is nearly reached": Case(
        gauge("penstock_provider_cap_used_ratio", SITE, "0.5x9 0.95x20", provider="all"),
        {"10m": {}, "20m": {"PenstockProviderCapNearlyUsed": [SITE | {"provider": "all"}]}},
    ),
    "predictions that are off": Case(
        gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0x60", model="m", le="1")
        | gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0+10x60", model="m", le="4")
        | gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0+10x60", model="m", le="+Inf")
        | gauge("penstock_ttft_prediction_ratio_count", SITE, "0+10x60", model="m"),
        {"10m": {}, "50m": {"PenstockPredictionOff": [SITE | {"model": "m"}]}},
    ),
    "predictions that hold": Case(
        gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0+5x60", model="m", le="1")
        | gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0+10x60", model="m", le="1.2")
        | gauge("penstock_ttft_prediction_ratio_bucket", SITE, "0+10x60", model="m", le="+Inf")
        | gauge("penstock_ttft_prediction_ratio_count", SITE, "0+10x60", model="m"),
        {"50m": {}},
    ),
}


def some_rules(*, is_burning: bool) -> dict[str, Any]:
    """The rules that look at targets, or the others: fewer are quicker."""
    groups = rules.rules()["groups"]
    names = {"penstock-goodput", "penstock-goodput-long", "penstock-slo"}
    return {
        "groups": [
            group for group in groups if (group["name"] in names) is is_burning or group["name"] == "penstock-slo"
        ]
    }


@pytest.mark.parametrize("scale", [1.0, 1 / 40])
def test_promtool_finds_nothing_wrong_with_the_rules(scale: float, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(rules.render(scale), encoding="utf-8")

    assert f"{len(rules.RECORDS) + len(ALERTS)} rules found" in check_rules(path)


def test_promtool_refuses_an_expression_that_is_none(tmp_path: Path) -> None:
    promtool()
    path = tmp_path / "rules.yaml"
    path.write_text(RULES.read_text(encoding="utf-8").replace("sum by (", "sum bye (", 1), encoding="utf-8")

    with pytest.raises(AssertionError, match="unexpected"):
        check_rules(path)


def test_budgets_that_burn_raise_their_alarms_and_nothing_else_does(tmp_path: Path) -> None:
    try_rules(tmp_path, some_rules(is_burning=True), BURNING)


def test_each_other_fault_raises_its_alarm_and_what_is_quiet_raises_none(tmp_path: Path) -> None:
    try_rules(tmp_path, some_rules(is_burning=False), OTHERS)


def test_a_case_that_names_a_wrong_alert_fails(tmp_path: Path) -> None:
    wrong = {"quiet": OTHERS["replicas as they should be"]._replace(firing={"30m": {"PenstockNoReplica": [POOL]}})}

    promtool()
    with pytest.raises(AssertionError, match="PenstockNoReplica"):
        try_rules(tmp_path, some_rules(is_burning=False), wrong)


def test_every_alert_fires_in_some_case_and_is_quiet_in_another() -> None:
    cases = [*BURNING.values(), *OTHERS.values()]
    fired = {alert for case in cases for firing in case.firing.values() for alert in firing}

    assert fired == {alert.name for alert in ALERTS}
    assert sum(not firing for case in cases for firing in case.firing.values()) > len(ALERTS)
