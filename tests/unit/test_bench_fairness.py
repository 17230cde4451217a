"""bench.fairness: what its figures are made of."""

import pytest

from bench.fairness import SCENARIOS, Load, rows_of, weight_errors


def test_shares_are_held_against_the_weights() -> None:
    assert weight_errors({"weight-1": 100, "weight-2": 200, "weight-4": 400}) == pytest.approx(
        {"weight-1": 0.0, "weight-2": 0.0, "weight-4": 0.0}
    )
    assert weight_errors({"weight-1": 110, "weight-2": 190, "weight-4": 400})["weight-1"] == pytest.approx(0.1)


def test_rows_compare_with_every_other_scenario() -> None:
    loads = {each.name: Load([0.001 * (number + 1)], {"a": 100}, 2.0) for number, each in enumerate(SCENARIOS)}
    weighted = Load([], {"weight-1": 1, "weight-2": 2, "weight-4": 4}, 1.0)
    rows = {row.name: row for row in rows_of(loads, {1: weighted, 3: weighted})}

    row = rows["TTFT of light tenants p90, vtc beside: flooded, arrival"]
    assert (row.ours, row.rival) == pytest.approx((3.0, 4.0))
    assert rows["output of all, vtc beside: flooded, arrival"].ratio == 1.0
    assert rows["weight-4: tokens beside its share, gateways: 3"].ours == pytest.approx(0.0)


def test_the_weights_may_be_measured_alone() -> None:
    rows = rows_of({}, {3: Load([], {"weight-1": 1, "weight-2": 2, "weight-4": 4}, 1.0)})

    assert [row.name for row in rows] == [
        f"weight-{weight}: tokens beside its share, gateways: 3" for weight in (1, 2, 4)
    ]
