"""Faults about the autoscaler, alone and in pairs, on a load that rises and falls: held against the same run without
them."""

import os
from collections.abc import Callable, Iterable
from functools import cache
from itertools import combinations
from random import Random

import pytest

from bench.support.scaling_bounds import Turn, count_changes, wrongs
from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.autoscale.observation import Observation
from penstock.autoscale.policy import Decision, Reason
from penstock.base.config import convert
from penstock.base.errors import ConfigError
from penstock.router.config import GatewayConfig
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.content import SegmentMaker
from penstock.sim.faults.fault import Fault
from penstock.sim.simulation import Simulation
from penstock.workers.config import EngineConfig, TimedConfig
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario
from penstock_loadtest.workload.plan import draw_plan

TIMED = TimedConfig(base_s=0.1, row_s=0.002, prefill_token_s=0.0002, num_blocks=400, max_model_len=2048)
ENGINE = EngineConfig(runner="timed", max_num_seqs=8, max_batched_tokens=256, timed=TIMED)
SCALED = AutoscaleConfig(
    max_replicas=40, window_s=20.0, start_s=20.0, scale_down_delay_s=60.0, tpot_target_s=0.3, unplaced_s=60.0
)
RISE = Scenario(
    duration_s=400.0,
    arrivals=Arrivals(process="spike", rate=1.0, to_rate=5.0, at_s=60.0, length_s=160.0),
    kinds=[
        Kind(
            prompts=Prompts(tokens=Lengths(uniform=(60, 180))),
            output_tokens=Lengths(uniform=(40, 80)),
        )
    ],
)
FAULTS: dict[str, Fault] = {
    "all reports missing": Fault(kind="reports_missing", at_s=100.0, length_s=40.0),
    "one gateway silent": Fault(kind="reports_missing", at_s=90.0, length_s=40.0, gateway=1),
    "all reports frozen": Fault(kind="reports_frozen", at_s=100.0, length_s=40.0),
    "one gateway frozen": Fault(kind="reports_frozen", at_s=150.0, length_s=50.0, gateway=0),
    "all reports late": Fault(kind="reports_late", at_s=70.0, length_s=60.0, by_s=4.0),
    "one gateway late": Fault(kind="reports_late", at_s=70.0, length_s=60.0, by_s=4.0, gateway=0),
    "changes fail": Fault(kind="changes_fail", at_s=65.0, length_s=30.0),
    "changes hang": Fault(kind="changes_hang", at_s=62.0, length_s=40.0),
    "controller away": Fault(kind="controller_away", at_s=65.0, length_s=30.0),
    "restart in mid-scale": Fault(kind="autoscaler_down", at_s=66.0, length_s=5.0),
    "clock ahead": Fault(kind="clock_off", at_s=0.0, length_s=70.0, by_s=5.0),
    "clock behind": Fault(kind="clock_off", at_s=0.0, length_s=70.0, by_s=-5.0),
    "no GPUs": Fault(kind="no_gpus", at_s=50.0, length_s=200.0, replicas=3),
    "no GPUs, not told": Fault(kind="no_gpus", at_s=50.0, length_s=200.0, replicas=3, is_told=False),
}


class Turns(Journal):
    """Takes down every turn."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(None)
        self.turns: list[Turn] = []
        self._clock = clock

    def note(
        self,
        pool: str,
        observation: Observation,
        decision: Decision,
        outcome: str,
        victims: tuple[str, ...],
        unix_s: float,
    ) -> None:
        self.turns.append(
            Turn(self._clock(), observation.serve_state.target, decision.target, decision.reason, outcome)
        )


def play(faults: Iterable[Fault] = (), scenario: Scenario = RISE, seed: int = 1) -> list[Turn]:
    config = SimulationConfig(seed=seed, gateways=2, faults=tuple(faults))
    journal = Turns(lambda: simulation.now)
    pool = SimulatedPool("pool", "cloud", 2, SCALED, ENGINE)
    simulation = Simulation([pool], GatewayConfig(), config, lambda _: None, lambda _: None, journal)
    simulation.run(draw_plan(scenario, SegmentMaker), 120.0, 60.0)
    return journal.turns


@cache
def played(*names: str) -> list[Turn]:
    return play([FAULTS[name] for name in names])


def undisturbed_most() -> int:
    return max(turn.target for turn in played())


def check(turns: list[Turn]) -> None:
    """What has to hold whatever goes wrong."""
    assert wrongs(turns, undisturbed_most()) == []


def test_the_undisturbed_load_needs_several_times_the_replicas_that_it_begins_with() -> None:
    turns = played()

    assert undisturbed_most() > 3 * turns[0].before
    assert turns[-1].target < undisturbed_most() / 2
    assert count_changes([turn.before for turn in turns]) <= 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_neither_overshoots_nor_flaps_nor_loses_the_last_safe_target(name: str) -> None:
    check(played(name))


PAIRS = list(combinations(FAULTS, 2))
HARD = [
    ("one gateway silent", "no GPUs, not told"),
    ("all reports missing", "no GPUs"),
    ("controller away", "restart in mid-scale"),
    ("one gateway late", "no GPUs"),
    ("changes hang", "no GPUs, not told"),
]
"""Pairs that went wrong once."""
SHUFFLED = Random(18).sample(PAIRS, len(PAIRS))
PLAYED = PAIRS if os.environ.get("PENSTOCK_TEST_FULL") else sorted({*SHUFFLED[:2], *HARD})


@pytest.mark.parametrize("pair", PLAYED)
def test_two_faults_at_once_neither_overshoot_nor_flap_nor_lose_the_last_safe_target(pair: tuple[str, str]) -> None:
    check(play([FAULTS[name] for name in pair]))


def test_each_fault_is_felt() -> None:
    calm = [turn[1:] for turn in played()]

    for name in ("all reports missing", "all reports late", "changes fail", "restart in mid-scale", "no GPUs"):
        turns = played(name)
        assert [turn[1:] for turn in turns] != calm, name
        reasons, outcomes = {turn.reason for turn in turns}, {turn.outcome for turn in turns}
        assert (Reason.STALE in reasons) == (name in ("all reports missing", "all reports late")), name
        assert ("failed" in outcomes) == (name == "changes fail"), name
        assert (Reason.SHORTAGE in reasons) == (name == "no GPUs"), name


def test_an_autoscaler_that_is_down_has_no_turn_and_the_next_one_goes_on() -> None:
    fault = FAULTS["restart in mid-scale"]

    turns = played("restart in mid-scale")

    assert not any(fault.is_on(turn.at_s) for turn in turns)
    last = max((turn for turn in turns if turn.at_s < fault.at_s), key=lambda turn: turn.at_s)
    first = min((turn for turn in turns if turn.at_s >= fault.end_s), key=lambda turn: turn.at_s)
    assert last.reason in (Reason.DEADLINE, Reason.STARTING), "in mid-scale"
    assert first.target >= last.target


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "no_gpus", "at_s": -1.0, "length_s": 1.0}, "at_s of a fault can't be negative, like -1"),
        ({"kind": "reports_late", "at_s": 0.0, "length_s": 1.0, "by_s": -1.0}, "by_s of reports_late can't be"),
        ({"kind": "changes_fail", "at_s": 0.0, "length_s": 1.0, "gateway": 0}, "concerns no single gateway"),
        ({"kind": "reports_late", "at_s": 0.0, "length_s": 1.0, "gateway": 1}, "gateway 1 of a fault is none of"),
    ],
)
def test_impossible_faults_are_refused_with_a_sentence(fault: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulationConfig(faults=(convert(fault, Fault, name="faults.yaml"),))
