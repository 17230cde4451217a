"""docs/alerts.md: its table and the head of each runbook are made of the alerts, what to look at and what to do is
written there by hand."""

import re

from deploy.dashboards.alerts import ALERTS, Alert
from deploy.dashboards.promql import scaled

BEGIN = "<!-- made by `make dashboards` from here -->\n"
END = "<!-- to here -->\n"
_MADE = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)


def render(page: str) -> str:
    """The page with everything between the two marks made again: the table, then for each alert what stands under its
    heading. Raises ValueError where an alert has no runbook, or a heading no alert."""
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    expected = [alert.name for alert in ALERTS]
    if headings != expected:
        raise ValueError(f"docs/alerts.md has the headings {headings}, the alerts are {expected}, in this order")
    parts = [_table(), *(_head(alert) for alert in ALERTS)]
    found = _MADE.findall(page)
    if len(found) != len(parts):
        raise ValueError(f"docs/alerts.md has {len(found)} generated parts; it needs a table and one for each alert")
    made = iter(parts)
    return _MADE.sub(lambda _: f"{BEGIN}{next(made)}{END}", page)


def _table() -> str:
    rows = (
        f"| [{alert.name}](#{alert.name.lower()}) | {alert.severity} | {alert.lasting or 'at once'} | {alert.meaning} |"
        for alert in ALERTS
    )
    return "\n".join(["| alert | severity | fires after | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _head(alert: Alert) -> str:
    """The sentence and the expression of an alert."""
    lasting = f", for {alert.lasting}" if alert.lasting else ""
    return f"{alert.meaning}\n\n```promql\n{scaled(alert.expression)}\n```\n\n{alert.severity.capitalize()}{lasting}.\n"
