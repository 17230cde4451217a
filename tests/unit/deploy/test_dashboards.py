"""Rules and dashboards are what their generator makes of the table of metrics, and name nothing that is not there."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from deploy.dashboards import boards, grafana, outputs, promql, rules, runbooks
from deploy.dashboards.alerts import ALERTS
from penstock.base.metrics import TABLE
from tests.unit.deploy.prometheus import check_rules

BOARDS = boards.boards()


def known() -> Mapping[str, frozenset[str]]:
    """Labels of all that an expression may name."""
    exported = {row.name: frozenset(row.labels) for row in TABLE}
    return exported | {record.name: rules.recorded_labels(record.name) for record in rules.RECORDS}


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Place and expression of every query in the files."""
    for path in sorted(outputs.DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}, {panel['title']}", target["expr"]


def test_the_committed_files_are_what_the_generator_makes() -> None:
    written = outputs.written()

    assert [path for path, text in written.items() if path.read_text(encoding="utf-8") != text] == []
    assert {*outputs.FILES.rglob("*.yaml"), *outputs.FILES.rglob("*.json")} == {*written} - {outputs.RUNBOOKS}


def test_every_metric_of_the_table_is_on_a_dashboard() -> None:
    shown = boards.named(panel for board in BOARDS for panel in boards.panels(board))

    assert {row.name for row in TABLE} <= shown


def test_every_name_and_label_of_an_expression_is_one_that_somebody_exports() -> None:
    found = {
        f"{place}: {expression}": wrong
        for place, expression in [
            *((record.name, record.expression) for record in rules.RECORDS),
            *((alert.name, alert.expression) for alert in ALERTS),
            *dashboard_expressions(),
        ]
        if (wrong := promql.faults(expression, known()))
    }

    assert found == {}


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum by (pool) (rate(penstock_request_total[5m]))", "penstock_request_total is no metric"),
        ('sum(penstock_replicas{pol="a"})', "penstock_replicas has no label pol"),
        ("sum by (model) (penstock_replicas)", "penstock_replicas has no label model"),
        ("max by (@, pool) (penstock_replicas or penstock_requests_total)", "no label pool"),
        ("penstock:slo_burn:rate7m > 1", "penstock:slo_burn:rate7m is no metric and no recording rule"),
    ],
)
def test_a_name_or_label_that_nobody_exports_is_found(expression: str, fault: str) -> None:
    assert fault in " ".join(promql.faults(expression, known()))


def test_what_a_recording_rule_groups_by_is_what_it_is_known_to_have() -> None:
    for record in rules.RECORDS:
        by = promql.grouped(record.expression)
        if by is not None:
            assert set(by) - {"@"} == rules.recorded_labels(record.name), record.name


def test_windows_are_shortened_and_installations_told_apart() -> None:
    text = "sum by (@, pool) (rate(penstock_index_gaps_total[10m])) > 5"

    assert promql.scaled(text) == "sum by (namespace, job, pool) (rate(penstock_index_gaps_total[10m])) > 5"
    assert "[15s]" in promql.scaled(text, 1 / 40)
    assert "[1500ms]" in promql.scaled(text, 1 / 400)
    assert promql.selected('a_b{} + penstock_replicas{tier="edge"} / up', 'job="j"') == (
        'a_b{} + penstock_replicas{tier="edge", job="j"} / up{job="j"}'
    )


def test_promtool_reads_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    path = tmp_path / "expressions.yaml"
    queries = [expression.replace("$__rate_interval", "1m") for _, expression in dashboard_expressions()]
    found = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": found}]}), encoding="utf-8")

    assert f"{len(queries)} rules found" in check_rules(path)


def test_every_query_is_of_the_installations_that_are_chosen() -> None:
    for place, expression in dashboard_expressions():
        for name, labels in promql.series(expression):
            wanted = {"namespace"} if name in boards.OF_THE_AUTOSCALER else {"namespace", "job"}
            assert wanted <= set(labels), place


def test_panels_of_a_dashboard_do_not_overlap_and_have_numbers_of_their_own() -> None:
    for board in BOARDS:
        panels = grafana.dashboard(board)["panels"]
        taken = [
            (x, y)
            for panel in panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]

        assert len(taken) == len(set(taken)), board.name
        assert max(x for x, _ in taken) < grafana.WIDTH
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_metric_that_no_panel_names_stands_at_the_end_of_its_board() -> None:
    row = TABLE[0]._replace(name="penstock_adapter_new_total", kind="counter", labels=("pool",), buckets=())

    board = boards._with(boards.CACHE, [row])

    assert board.sections[-1].title == boards.REST
    assert board.sections[-1].panels[0].queries[0].expression == (
        "sum by (pool) (rate(penstock_adapter_new_total[$__rate_interval]))"
    )


def test_every_alert_has_a_runbook_with_its_head_and_something_to_do() -> None:
    page = outputs.RUNBOOKS.read_text(encoding="utf-8")
    parts = re.split(r"^### (\w+)$", page, flags=re.MULTILINE)[1:]

    assert parts[::2] == [alert.name for alert in ALERTS]
    for alert, text in zip(ALERTS, parts[1::2], strict=True):
        prose = text.partition(runbooks.END)[2]
        assert len(prose.split()) > 25, alert.name
        assert len(text.partition(runbooks.END)[0]) > 50, alert.name


def test_an_alert_without_a_runbook_is_refused() -> None:
    page = outputs.RUNBOOKS.read_text(encoding="utf-8")

    with pytest.raises(ValueError, match="headings"):
        runbooks.render(page.replace("### PenstockNoReplica\n", "### PenstockNoReplicas\n"))
