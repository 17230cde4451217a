"""The load tester, whole but for its files, against a fake server in a process of its own: what it reports is what was
programmed.

A busy machine makes both of them late, so a run may be made again; figures that are off by construction are off every
time.
"""

import pytest

from bench.support.accuracy import BEHAVIOUR, Measured, measure_accuracy, scenario, stalled
from penstock_loadtest.fake.behaviour import Behaviour

RUNS = 3


def best(behaviour: Behaviour, rate: float, duration_s: float) -> Measured:
    """The first run that is within bounds, else the best."""
    runs: list[Measured] = []
    while len(runs) < RUNS and not any(run.worst.excess <= 1 for run in runs):
        runs.append(measure_accuracy(behaviour, scenario(rate, duration_s)))
    return min(runs, key=lambda run: run.worst.excess)


def check(run: Measured) -> None:
    assert run.worst.excess <= 1, "\n".join(
        f"{each.name}: reported {each.reported_s:.5f}, programmed {each.programmed_s:.5f}" for each in run.compared
    )
    assert run.summary.lateness.p99_s is not None
    assert 0 <= run.summary.lateness.p99_s < 0.1


def test_reported_percentiles_are_the_programmed_ones() -> None:
    check(best(BEHAVIOUR, rate=25, duration_s=4))


def test_a_stall_is_in_the_figures_of_every_request_that_it_delayed() -> None:
    run = best(stalled(BEHAVIOUR, from_s=3.0, for_s=2.0), rate=20, duration_s=7)

    check(run)
    figures = {each.name: each.reported_s for each in run.compared}
    assert figures["TTFT p90"] > 0.8  # requests of the stall's two seconds left on time, and waited for its end
    assert figures["TTFT p99"] == pytest.approx(2.0, abs=0.5)
