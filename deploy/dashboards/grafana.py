"""Dashboards as Grafana reads them: its JSON model, of version 39 (Grafana 11 and later; older ones from 8 on read what
is used of it).

A data source, and which installations are shown, are asked for at the top of each dashboard, so nothing in the files
belongs to one Prometheus.
"""

import json
from typing import Any

from deploy.dashboards.boards import OF_THE_AUTOSCALER, Board, Panel
from deploy.dashboards.promql import selected, series

Json = dict[str, Any]

SCHEMA_VERSION = 39
WIDTH, COLUMNS, HEIGHT = 24, 3, 8
"""Grafana's grid: units across, panels side by side, units that a panel is high."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SITE = 'namespace=~"$namespace", job=~"$job"'
SITE_OF_THE_AUTOSCALER = 'namespace=~"$namespace"'
ANY = ".*"
"""Value of a variable that also takes what has no such label."""
TAG = "penstock"


def dashboard(board: Board) -> Json:
    """The board as Grafana's JSON model."""
    return {
        "uid": f"penstock-{board.name}",
        "title": board.title,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "",
        "links": [{"title": "Penstock", "type": "dashboards", "tags": [TAG], "asDropdown": True, "keepTime": True}],
        "annotations": {"list": [_alerts()]},
        "templating": {"list": [_source(), _variable("namespace"), _variable("job")]},
        "panels": _panels(board),
    }


def render(board: Board) -> str:
    """`dashboard` as text."""
    return json.dumps(dashboard(board), indent=1) + "\n"


def _source() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(label: str) -> Json:
    """A choice among values of a label that Prometheus gives the gateways; any at first."""
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values(penstock_batches_running, {label})", "refId": label},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ANY,
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _alerts() -> Json:
    """Alerts that fired, as marks on every chart."""
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "expr": 'max by (alertname) (ALERTS{alertname=~"Penstock.*", alertstate="firing"})',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _panels(board: Board) -> list[Json]:
    found: list[Json] = []
    top = 0
    for section in board.sections:
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        found.append({"id": len(found) + 1, "type": "row", "title": section.title, "gridPos": place, "panels": []})
        top += 1
        for number, panel in enumerate(section.panels):
            row, column = divmod(number, COLUMNS)
            width = WIDTH // COLUMNS
            place = {"x": column * width, "y": top + row * HEIGHT, "w": width, "h": HEIGHT}
            found.append({"id": len(found) + 1, **_panel(panel), "gridPos": place})
        top += -(-len(section.panels) // COLUMNS) * HEIGHT
    return found


def _panel(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": selected(query.expression, _site(query.expression)),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def _site(expression: str) -> str:
    """Matchers of the installations that are shown."""
    is_own = all(each.name in OF_THE_AUTOSCALER for each in series(expression))
    return SITE_OF_THE_AUTOSCALER if is_own else SITE
