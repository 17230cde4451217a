from pathlib import Path

import pytest

from bench.simulated_beside import Figures, Kind, compare, count_seconds, play_simulated, read_pools, write_scenario
from penstock.sim.config import SimulationConfig
from penstock_loadtest.results.summary import Distribution

TIMES = Distribution(count=100, mean=1.0, p50=1.0, p90=2.0, p99=4.0, max=5.0)
REAL = Figures(TIMES, TIMES, 0.95, 100.0)


def test_replicas_count_from_the_first_report_on_and_until_the_end() -> None:
    ready = [(0.4, 2.0), (10.0, 3.0), (20.0, 2.0), (99.0, 9.0)]

    assert count_seconds(ready, 30.0) == pytest.approx(10 * 2 + 10 * 3 + 10 * 2)


@pytest.mark.parametrize(
    ("simulated", "missed"),
    [
        (REAL, []),
        (REAL._replace(attainment=0.92), ["in target"]),
        (REAL._replace(replica_seconds=88.0), ["replicas ready"]),
    ],
)
def test_a_figure_beyond_its_bound_is_named(simulated: Figures, missed: list[str]) -> None:
    kind = Kind("timed", [], SimulationConfig())

    found = list(compare(kind, 0.9, [REAL], [simulated]))

    assert [row.name.partition(": ")[2] for row, is_within in found if not is_within] == missed


def test_the_slowest_may_differ_by_what_the_real_runs_differ_by() -> None:
    kind = Kind("timed", [], SimulationConfig())
    real = [REAL._replace(ttft_s=_with_p99(value)) for value in (3.0, 4.0, 5.0)]

    by_spread = list(compare(kind, 0.9, real, [REAL._replace(ttft_s=_with_p99(5.9))]))
    too_far = list(compare(kind, 0.9, real, [REAL._replace(ttft_s=_with_p99(6.1))]))

    assert all(is_within for _, is_within in by_spread)
    assert [row.name for row, is_within in too_far if not is_within] == ["timed, 0.9 of the knee: TTFT p99"]


def test_a_load_below_the_knee_is_held_in_the_simulator(tmp_path: Path) -> None:
    pools = [pool._replace(replicas=1, autoscale=None) for pool in read_pools("timed", tmp_path)]
    kind = Kind("timed", pools, SimulationConfig())

    found = play_simulated(kind, write_scenario("engine", 1.0, tmp_path), 1, tmp_path / "run")

    assert found.attainment > 0.9
    assert found.replica_seconds == pytest.approx(90.0)


def _with_p99(value: float) -> Distribution:
    return Distribution(count=100, mean=1.0, p50=1.0, p90=2.0, p99=value, max=9.0)
