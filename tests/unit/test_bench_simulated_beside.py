import json
from pathlib import Path

import msgspec
import pytest

from bench.simulated_beside import (
    WARM_UP_SEED,
    Figures,
    Kind,
    compare,
    count_seconds,
    measure_slowdown,
    play_simulated,
    read_pools,
    slowed,
    write_scenario,
)
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


def test_how_much_longer_steps_took_than_the_table_says_is_found_from_a_run(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    seconds = [[[0.0, 0.0], [0.2, 0.2]], [[0.012, 0.02], [0.21, 0.22]]]
    axes = {"decode_rows": [0, 8], "prefill_tokens": [0, 256], "kv_tokens": [0, 8192]}
    grids = {"seconds": seconds, "short_seconds": seconds, "short_prompt_tokens": 128}
    table.write_text(json.dumps(axes | grids), encoding="utf-8")
    pools = read_pools("engine", tmp_path)
    timed = msgspec.structs.replace(pools[0].engine.timed, table=str(table))
    settings = msgspec.structs.replace(pools[0].engine, runner="timed", timed=timed)
    kind = Kind("engine", [pools[0]._replace(engine=settings)], SimulationConfig())
    scenario = write_scenario("engine", 2.5, tmp_path)

    run = play_simulated(slowed(kind, 1.25, tmp_path), scenario, WARM_UP_SEED, tmp_path / "run")

    assert measure_slowdown(kind, run, scenario, tmp_path) == pytest.approx(1.25, rel=0.01)


def _with_p99(value: float) -> Distribution:
    return Distribution(count=100, mean=1.0, p50=1.0, p90=2.0, p99=value, max=9.0)
