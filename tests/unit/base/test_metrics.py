from pathlib import Path

from penstock.base.metrics import TABLE, Metrics


def test_every_row_of_the_table_is_an_instrument() -> None:
    families = {family.name for family in Metrics().registry.collect()}

    assert families == {row.name.removesuffix("_total") if row.kind == "counter" else row.name for row in TABLE}


def test_names_follow_prometheus_rules() -> None:
    assert all(row.name.startswith("penstock_") for row in TABLE)
    assert all(row.name.endswith("_total") == (row.kind == "counter") for row in TABLE)
    assert all(bool(row.buckets) == (row.kind == "histogram") for row in TABLE)
    assert all(row.buckets == tuple(sorted(set(row.buckets))) for row in TABLE)


def test_labels_are_of_the_configuration_or_of_small_fixed_sets() -> None:
    configured, fixed = (
        {"model", "pool", "tier", "provider", "lease", "tenant"},
        {
            *("class", "window", "code", "kind", "reason", "outcome", "limit", "verb", "resource", "field"),
            "coefficient",
        },
    )

    assert {label for row in TABLE for label in row.labels} <= configured | fixed


def test_two_gateways_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics(), Metrics()

    first.requests.labels("m", "200").inc()

    assert b'penstock_requests_total{code="200",model="m"} 1.0' in first.render()
    assert b'code="200"' not in second.render()


def test_the_documentation_has_every_metric_as_the_table_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()

    documented = [line for line in page if line.startswith("| `penstock_")]
    assert documented == [f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.help} |" for row in TABLE]
