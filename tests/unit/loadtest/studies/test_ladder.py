"""The ladder as a command runs it, against computed servers."""

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results.knee import Ladder, Rules
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Arrivals, Scenario, Targets, Trace
from penstock_loadtest.studies.ladder import (
    PER_SECOND,
    SPEED,
    StepLength,
    find_unit,
    make_ladder_table,
    run_ladder,
    set_rate,
)
from tests.unit.loadtest.modelled import TARGET, Modelled, answered, refused

KNEE = 10.0
SCENARIO = Scenario(
    name="steady", seed=7, arrivals=Arrivals(process="constant", rate=1.0), targets=Targets(ttft_s=0.5, tpot_s=0.1)
)
RULES = Rules(start_rate=1.0, max_rate=1000.0)
STEP_LENGTH = StepLength(warmup_s=1.0, step_s=2.0, min_requests=20)


def served(scenario: Scenario, _: Target) -> list[Record]:
    """One queue: above the knee every request waits longer than the one before."""
    rate = scenario.arrivals.rate
    count = int((scenario.duration_s or 0) * rate)
    behind_s = max(0.0, 1 / KNEE - 1 / rate)
    return [
        answered(index, index / rate, ttft_s=0.1 + (0.6 if behind_s else 0.0) + index * behind_s)
        for index in range(count)
    ]


def climb(
    out: Path, run: Modelled, *, rules: Rules = RULES, scenario: Scenario = SCENARIO, is_reachable: bool = True
) -> Ladder:
    return run_ladder(
        scenario,
        TARGET,
        out,
        rules=rules,
        step_length=STEP_LENGTH,
        settle_s=0.0,
        console=None,
        run=run,
        answers=lambda _: is_reachable,
    )


def test_the_knee_of_a_known_server_is_found(tmp_path: Path) -> None:
    ladder = climb(tmp_path, Modelled(served))

    assert ladder.is_confirmed
    assert ladder.knee is not None
    assert ladder.missed is not None
    assert ladder.knee <= KNEE < ladder.missed <= ladder.knee * 1.05
    assert msgspec.convert(json.loads((tmp_path / "ladder.json").read_text()), Ladder, strict=False) == ladder


def test_every_step_has_its_own_folder_seed_and_warm_up(tmp_path: Path) -> None:
    run = Modelled(served)
    ladder = climb(tmp_path, run)

    assert [step.folder for step in ladder.steps] == run.folders
    assert len(set(run.folders)) == len(run.folders)
    assert [scenario.seed for scenario in run.scenarios] == list(range(7, 7 + len(run.scenarios)))
    assert {scenario.warmup_s for scenario in run.scenarios} == {1.0}


@pytest.mark.parametrize("stop", ["stop_at", "kill_at"])
def test_a_ladder_that_was_stopped_goes_on_with_the_steps_it_has(tmp_path: Path, stop: str) -> None:
    whole = climb(tmp_path / "whole", Modelled(served))
    stopped = climb(tmp_path / "stopped", Modelled(served, **{stop: 4}))
    on_disk = msgspec.convert(json.loads((tmp_path / "stopped" / "ladder.json").read_text()), Ladder, strict=False)
    rest = Modelled(served)
    ladder = climb(tmp_path / "stopped", rest)

    assert (len(stopped.steps), stopped.is_complete) == (3, False)
    assert on_disk == stopped
    assert stopped.verdict.startswith("Not finished after 3 steps")
    assert len(rest.scenarios) == len(whole.steps) - 3
    assert rest.folders[0].endswith("-2"), "the folder of the interrupted run is kept"
    assert [step.rate for step in ladder.steps] == [step.rate for step in whole.steps]


def test_a_finished_ladder_is_not_run_again(tmp_path: Path) -> None:
    first, again = climb(tmp_path, Modelled(served)), Modelled(served)

    assert climb(tmp_path, again) == first
    assert again.scenarios == []


def test_a_finished_ladder_can_be_made_finer(tmp_path: Path) -> None:
    climb(tmp_path, Modelled(served))
    finer = climb(tmp_path, Modelled(served), rules=msgspec.structs.replace(RULES, precision=0.01))

    assert finer.knee is not None
    assert finer.missed is not None
    assert finer.knee <= KNEE < finer.missed <= finer.knee * 1.01


def test_another_load_is_not_joined_to_a_ladder(tmp_path: Path) -> None:
    climb(tmp_path, Modelled(served))

    with pytest.raises(ScenarioInvalid, match=r"targets\.ttft_s was 0\.5, now 1\.0"):
        climb(
            tmp_path,
            Modelled(served),
            scenario=msgspec.structs.replace(SCENARIO, targets=Targets(ttft_s=1.0, tpot_s=0.1)),
        )


def test_a_server_that_refuses_everything_ends_the_ladder(tmp_path: Path) -> None:
    run = Modelled(
        lambda scenario, target: (
            served(scenario, target) if scenario.arrivals.rate < 4 else [refused(index, 2.0) for index in range(5)]
        )
    )
    ladder = climb(tmp_path, run)

    assert len(run.scenarios) == 3
    assert ladder.verdict == "The server stopped answering at 4 requests/s."
    assert not ladder.is_confirmed


def test_a_server_that_is_gone_after_a_step_ends_the_ladder(tmp_path: Path) -> None:
    ladder = climb(tmp_path, Modelled(served), is_reachable=False)

    assert ladder.steps[-1].rate == 16.0
    assert ladder.steps[-1].is_dead


def test_a_ladder_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    climb(tmp_path, Modelled(served), is_reachable=False)
    ladder = climb(tmp_path, Modelled(served))

    assert ladder.is_confirmed
    assert not any(step.is_dead for step in ladder.steps)


def test_ctrl_c_while_the_server_settles_keeps_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock_loadtest.studies.ladder.time.sleep", interrupted)
    ladder = climb(tmp_path, Modelled(served))

    assert len(ladder.steps) == 1
    assert (tmp_path / "ladder.json").exists()


def test_a_step_lasts_long_enough_for_its_requests() -> None:
    slow, fast = (set_rate(SCENARIO, rate, number=1, step_length=STEP_LENGTH) for rate in (2.0, 100.0))

    assert (slow.duration_s, slow.arrivals.rate) == (1.0 + 20 / 2.0, 2.0)
    assert fast.duration_s == 1.0 + 2.0


def test_the_rate_of_a_trace_is_its_speed() -> None:
    scenario = Scenario(trace=Trace(format="azure", path=Path("trace.csv"), time_scale=0.5))
    step = set_rate(scenario, 4.0, number=2, step_length=STEP_LENGTH)

    assert find_unit(scenario) == SPEED
    assert step.trace is not None
    assert step.trace.time_scale == 0.125
    assert step.duration_s == 3.0


@pytest.mark.parametrize("process", ["constant", "poisson", "gamma"])
def test_steady_arrivals_can_be_raised(process: str) -> None:
    assert find_unit(msgspec.convert({"arrivals": {"process": process}}, Scenario)) == PER_SECOND


@pytest.mark.parametrize("process", ["step", "ramp", "spike"])
def test_a_load_without_a_steady_rate_is_refused(process: str) -> None:
    with pytest.raises(ScenarioInvalid, match=f"the arrivals of this scenario are a {process}"):
        find_unit(msgspec.convert({"arrivals": {"process": process, "to_rate": 2.0}}, Scenario))


def test_a_closed_loop_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="a closed loop has none"):
        find_unit(Scenario(loop="closed"))


def test_the_table_has_a_row_a_step_in_the_order_of_the_rates(tmp_path: Path) -> None:
    ladder = climb(tmp_path, Modelled(served))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(make_ladder_table(ladder))
    lines = [
        line for line in capture.get().splitlines() if " raise " in line or " bisect " in line or " confirm " in line
    ]
    rates = [float(line.split("│")[2]) for line in lines]

    assert len(rates) == len(ladder.steps)
    assert rates == sorted(rates)
