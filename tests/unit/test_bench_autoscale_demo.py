"""bench.autoscale_demo: what it takes for a run to be as it should, and the trace that it replays."""

from pathlib import Path

import pytest

from bench.autoscale_demo import EXAMPLE, POOL, Outcome, Progress, delay_s, gauges, progress_line, steps, wrongs
from bench.support.autoscale_course import MOST, TTFT_TARGET_S, Sample, course, figures
from bench.support.bursts import BURSTS, Burst, bursts_of, write_trace
from penstock.cli.config import load_platform
from penstock_loadtest.scenario import load_scenario
from penstock_loadtest.workload.traces import read_trace

SIX = [1, *[3, 2, 1], *[2, 1] * 5]
RIGHT = Outcome(
    counts=SIX,
    num_bursts=6,
    num_downs=6,
    delay_s=10.0,
    took_s=600.0,
    outcomes=["finished"] * 3,
    is_balanced=True,
)


def test_a_run_at_every_bound_is_right() -> None:
    assert wrongs(RIGHT) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (RIGHT._replace(num_bursts=5), "the load had 5 bursts, fewer than 6"),
        (RIGHT._replace(counts=[1, *[2, 1] * 6]), "the pool had 2 replicas at most, not 3"),
        (RIGHT._replace(counts=[1, 4, 1, *[3, 1] * 5]), "the pool had 4 replicas at most, not 3"),
        (RIGHT._replace(num_downs=5), "the autoscaler carried out 5 scale-downs, fewer than 6"),
        (RIGHT._replace(counts=SIX[:-2]), "came back to 1 replica 5 times"),
        (
            RIGHT._replace(counts=[*SIX, 2]),
            "came back to 1 replica 6 times, not after 6 bursts and at the end; it went",
        ),
        (RIGHT._replace(delay_s=9.5), "scale_down_delay_s is 9.5, below 10"),
        (RIGHT._replace(took_s=601.0), "it took 601 s, more than 600"),
        (RIGHT._replace(outcomes=["finished", "shed", "failed", "failed"]), "3 requests did not finish: failed, shed"),
        (RIGHT._replace(outcomes=[]), "no request was sent"),
        (RIGHT._replace(is_balanced=False), "the ledger of penstock-loadtest does not balance"),
    ],
)
def test_a_bound_that_is_missed_is_one_sentence(changed: Outcome, sentence: str) -> None:
    (said,) = wrongs(changed)

    assert sentence in said


def test_a_pool_that_nobody_saw_is_wrong() -> None:
    assert "it went nowhere" in " ".join(wrongs(RIGHT._replace(counts=[])))


def test_gauges_are_of_the_pool_that_is_asked_for() -> None:
    page = """# TYPE penstock_replicas gauge
penstock_replicas{pool="played",tier="cloud"} 2.0
penstock_replicas{pool="real",tier="edge"} 1.0
# TYPE penstock_queue_length gauge
penstock_queue_length{pool="played"} 7.0
"""

    assert gauges(page, "played") == {"replicas": 2.0, "queued": 7.0}
    assert steps([1.0, 1.0, 3.0, 1.0]) == [1, 3, 1]


def test_a_line_says_time_rate_replicas_and_what_waits() -> None:
    values = {"replicas": 2.0, "target": 3.0, "queued": 4.0, "admitted": 1.0, "running": 16.0}

    assert (
        progress_line(20.0, [1.0, 15.5, 16.0, 20.0, 30.0], values)
        == "   20 s of 30   0.6 requests/s  replicas: 2, wanted 3  requests: 16 running, 5 waiting"
    )


def test_lines_come_every_five_seconds_once_the_load_has_begun(tmp_path: Path) -> None:
    said: list[str] = []
    progress = Progress(tmp_path, [0.0, 30.0], said.append)
    progress(Sample(99.0, {}))
    (tmp_path / "observed.jsonl").touch()
    for unix_s in (100.0, 102.0, 105.0, 109.5, 110.0):
        progress(Sample(unix_s, {"replicas": 1.0}))

    assert [line.split(" s of")[0].strip() for line in said] == ["0", "5", "10"]


def test_the_trace_is_what_its_module_makes_and_has_its_bursts(tmp_path: Path) -> None:
    write_trace(tmp_path / "bursts.csv")
    trace = load_scenario(EXAMPLE / "load.yaml", []).trace
    assert trace is not None
    at_s = [row.at_s for row in read_trace(trace)]

    assert (tmp_path / "bursts.csv").read_bytes() == (EXAMPLE / "bursts.csv").read_bytes()
    assert [(burst.begin_s, burst.end_s) for burst in bursts_of(at_s)] == [
        (burst.begin_s, burst.end_s) for burst in BURSTS
    ]
    assert at_s[0] == 0


def test_bursts_are_successive_bins_with_more_than_one_replica_takes() -> None:
    at_s = [*(5 + n / 4 for n in range(40)), *(30 + n / 2.9 for n in range(14)), *(40 + n / 3.1 for n in range(15))]

    assert bursts_of(at_s) == [Burst(5.0, 15.0, 4.0), Burst(40.0, 45.0, 3.0)]
    assert bursts_of([]) == []


def test_the_figures_of_a_run_are_counted_from_each_burst() -> None:
    records = [{"intended_s": 5 + n / 4, "first_s": 5.5 + n / 4} for n in range(20)]
    records += [{"intended_s": 20.0, "first_s": 22.0}, {"intended_s": 30.0}]
    samples = [
        Sample(100.0 + at, {"replicas": replicas}) for at, replicas in ((4, 1), (8, 2), (9, 3), (12, 2), (25, 1))
    ]

    found = {row.name: row.ours for row in figures(course(100.0, samples, records), num_downs=1, took_s=40.2)}

    assert found["bursts"] == 1
    assert found["burst's begin to a second replica that serves, median"] == 3.0
    assert found["burst's end to 1 replica, longest"] == 15.0
    assert found["TTFT in bursts, p50"] == 0.5
    assert found["TTFT between them, p50"] == 2.0
    assert found["first tokens within 1 s"] == round(20 / 22, 4), "what never came is late"
    assert found["the whole demo"] == 40


def test_the_examples_files_load_and_agree() -> None:
    pools = {pool.name: pool for pool in load_platform(EXAMPLE / "penstock.yaml").pools}
    scenario = load_scenario(EXAMPLE / "load.yaml", [])

    scaled = pools[POOL].autoscale
    assert scaled is not None
    assert (scaled.min_replicas, scaled.max_replicas, scaled.ttft_target_s) == (1, MOST, TTFT_TARGET_S)
    assert scaled.scale_down_delay_s == delay_s() >= 10
    assert scenario.targets.ttft_s == TTFT_TARGET_S
    assert {model.name for model in scenario.models} == {name for pool in pools.values() for name in pool.names}
    assert [pool.engine.runner for pool in pools.values()].count("timed") == 1, "one pool computes for real"
