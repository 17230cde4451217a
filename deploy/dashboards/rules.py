"""Prometheus' rules: what is recorded, and the alerts of `alerts.ALERTS`, as one file that Prometheus reads.

Burn rates are recorded over five windows, as the multiwindow, multi-burn-rate alerts of the SRE workbook need them
(https://sre.google/workbook/alerting-on-slos/, 6). Invariants: names say true windows also where `scale` shortens
them; without traffic there is no burn rate, rather than one of 0 or NaN.
"""

from typing import Any, NamedTuple

import yaml

from deploy.dashboards.alerts import ALERTS, Alert
from deploy.dashboards.promql import duration, scaled, seconds

SHORT_WINDOWS = ("5m", "30m", "1h")
LONG_WINDOWS = ("6h", "3d")
INTERVAL_S = 30
LONG_INTERVAL_S = 120
"""Seconds between evaluations over LONG_WINDOWS: they read more samples, and must be less than Prometheus' five minutes
of staleness apart."""
LEAST_INTERVAL_S = 1
RUNBOOK = "docs/alerts.md"
"""Place of the runbooks; the chart puts an address in its stead (monitoring.rules.runbooks)."""


class Record(NamedTuple):
    """A recording rule; its expression in the short form of `promql`."""

    name: str
    expression: str


def burn_records(window: str) -> tuple[Record, ...]:
    """What the window's burn-rate alerts look at, by model and class."""
    requests, missed = f"penstock:slo_requests:rate{window}", f"penstock:slo_missed:ratio{window}"
    all_of, bad = "penstock_slo_requests_total", 'penstock_slo_requests_total{outcome!="met"}'
    return (
        Record(requests, f"sum by (@, model, class) (rate({all_of}[{window}]))"),
        Record(
            missed,
            f"(sum by (@, model, class) (rate({bad}[{window}])) or 0 * {requests}) / ({requests} > 0)",
        ),
        Record(
            f"penstock:slo_burn:rate{window}",
            f"{missed} / on (@) group_left () (1 - max by (@) (penstock_slo_objective))",
        ),
        Record(f"penstock:slo_missed:increase{window}", f"sum by (@, model, class) (increase({bad}[{window}]))"),
    )


GOODPUT = tuple(
    Record(
        f"penstock:goodput_{kind}:rate5m",
        f'sum by (@, model, class, tier) (rate(penstock_slo_{kind}_total{{outcome="met"}}[5m]))',
    )
    for kind in ("requests", "tokens")
)
RECORDS: tuple[Record, ...] = (
    *GOODPUT,
    *(record for window in SHORT_WINDOWS + LONG_WINDOWS for record in burn_records(window)),
)


def recorded_labels(name: str) -> frozenset[str]:
    """Labels of what a recording rule makes, beside those of `promql.SITE_LABELS`."""
    assert any(name == record.name for record in RECORDS), name
    return frozenset({"model", "class", *(("tier",) if name.startswith("penstock:goodput") else ())})


def rules(scale: float = 1.0) -> dict[str, Any]:
    """The file as Prometheus reads it. scale: factor of every window, wait and interval."""
    long = [record for window in LONG_WINDOWS for record in burn_records(window)]
    short = [record for record in RECORDS if record not in long]
    recording = (("penstock-goodput", INTERVAL_S, short), ("penstock-goodput-long", LONG_INTERVAL_S, long))
    groups = [_group(name, every, [_record(each, scale) for each in found], scale) for name, every, found in recording]
    for name in dict.fromkeys(alert.group for alert in ALERTS):
        alerts = [_alert(each, scale) for each in ALERTS if each.group == name]
        groups.append(_group(f"penstock-{name}", INTERVAL_S, alerts, scale))
    return {"groups": groups}


def render(scale: float = 1.0) -> str:
    """`rules` as YAML."""
    return HEAD + yaml.safe_dump(rules(scale), sort_keys=False, width=110, allow_unicode=True)


HEAD = "# Prometheus' rules of Penstock, made by `make dashboards` (deploy/dashboards); runbooks: docs/alerts.md\n"


def _group(name: str, every_s: int, found: list[dict[str, Any]], scale: float) -> dict[str, Any]:
    return {"name": name, "interval": duration(max(LEAST_INTERVAL_S, every_s * scale)), "rules": found}


def _record(record: Record, scale: float) -> dict[str, Any]:
    return {"record": record.name, "expr": scaled(record.expression, scale)}


def _alert(alert: Alert, scale: float) -> dict[str, Any]:
    waits = {"for": duration(seconds(alert.lasting) * scale)} if alert.lasting else {}
    return {
        "alert": alert.name,
        "expr": scaled(alert.expression, scale),
        **waits,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.meaning,
            "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
        },
    }
