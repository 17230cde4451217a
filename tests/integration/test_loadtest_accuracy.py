"""The load tester, whole but for its files, against a fake server in a process of its own: what it reports is what was
programmed.

A busy machine makes both of them late, so a run may be made again; what is off or late by construction is so every
time.
"""

import pytest

from bench.support.accuracy import BEHAVIOUR, Measured, measure_accuracy, scenario, stalled
from penstock_loadtest.fake.behaviour import Behaviour

RUNS = 6
LATE_S = 0.1
"""The most by which all but one of a hundred requests may leave late."""


def is_good(run: Measured) -> bool:
    return run.worst.excess <= 1 and run.summary.lateness.p99_s is not None and run.summary.lateness.p99_s < LATE_S


def best(behaviour: Behaviour, rate: float, duration_s: float) -> Measured:
    """The first run that is within bounds, else the one with the best figures."""
    runs: list[Measured] = []
    while len(runs) < RUNS:
        run = measure_accuracy(behaviour, scenario(rate, duration_s))
        if is_good(run):
            return run
        runs.append(run)
    return min(runs, key=lambda run: run.worst.excess)


def check(run: Measured) -> None:
    assert run.worst.excess <= 1, "\n".join(
        f"{each.name}: reported {each.reported_s:.5f}, programmed {each.programmed_s:.5f}" for each in run.compared
    )
    assert run.summary.lateness.p99_s is not None
    assert 0 <= run.summary.lateness.p99_s < LATE_S


def test_reported_percentiles_are_the_programmed_ones() -> None:
    check(best(BEHAVIOUR, rate=25, duration_s=4))


def test_a_stall_is_in_the_figures_of_every_request_that_it_delayed() -> None:
    run = best(stalled(BEHAVIOUR, from_s=3.0, for_s=2.0), rate=20, duration_s=7)

    check(run)
    figures = {each.name: each.reported_s for each in run.compared}
    assert figures["TTFT p90"] > 0.8  # requests of the stall's two seconds left on time, and waited for its end
    assert figures["TTFT p99"] == pytest.approx(2.0, abs=0.5)
