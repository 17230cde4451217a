"""Whole simulations: what holds of every request, the same seed twice, a closed form, and the autoscaler inside."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.support.compared_decisions import ComparedDecisions
from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.base.errors import ConfigError
from penstock.router.config import GatewayConfig
from penstock.router.replicas.routing_policy import RoutedRequest, production
from penstock.router.routing.native_search import open_search
from penstock.router.routing.policy import Decision, Reason, ReplicaView
from penstock.router.routing.search import IN_ARRAYS, Searching, search
from penstock.router.routing.tiers import TierPolicy
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.content import SegmentMaker
from penstock.sim.request import SimulatedRequest
from penstock.sim.results import Simulated, simulate
from penstock.sim.simulation import Simulation
from penstock.wire.targets import ClassTargets, Target
from penstock.workers.config import EngineConfig, TimedConfig
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results.records import Record, read_records
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Prompts, Scenario, Sessions, Share
from penstock_loadtest.workload.plan import draw_plan

TIMED = TimedConfig(base_s=0.01, row_s=0.0005, prefill_token_s=0.0001, num_blocks=400, max_model_len=2048)
ENGINE = EngineConfig(runner="timed", max_num_seqs=8, max_batched_tokens=256, timed=TIMED)
POOL = SimulatedPool("pool", "cloud", 2, None, ENGINE)
SCALED = AutoscaleConfig(max_replicas=12, window_s=20.0, start_s=15.0, scale_down_delay_s=30.0, ttft_target_s=1.0)


def kind(prompt: float = 120, output: float = 30, **changes: Any) -> Kind:
    prompts = Prompts(tokens=Lengths(lognormal=(prompt, prompt * 6), max=1500))
    plain: dict[str, Any] = {"prompts": prompts, "output_tokens": Lengths(lognormal=(output, output * 4), max=300)}
    return Kind(**plain | changes)


def load(rate: float, duration_s: float = 60.0, **changes: Any) -> Scenario:
    plain: dict[str, Any] = {"duration_s": duration_s, "arrivals": Arrivals(rate=rate), "kinds": [kind()]}
    return Scenario(**plain | changes)


def run(
    folder: Path,
    scenario: Scenario,
    pools: list[SimulatedPool] | None = None,
    gateway: GatewayConfig | None = None,
    **settings: Any,
) -> tuple[Simulated, list[Record]]:
    found = simulate(
        scenario, pools or [POOL], gateway or GatewayConfig(), SimulationConfig(**settings), folder, plots=False
    )
    return found, list(read_records(folder / "records.jsonl"))


@pytest.mark.parametrize(
    ("scenario", "gateway"),
    [
        (load(8.0), None),
        (load(80.0, drain_s=10.0), GatewayConfig(max_queue=30, queue_timeout_s=2.0)),  # far too much
        (load(20.0, cancel=Cancel(share=0.3)), None),
        (load(30.0, timeout_s=1.0), None),
        (load(30.0, tenants=[Share(name="a", weight=4), Share(name="b")]), GatewayConfig(queue_timeout_s=2.0)),
        (load(3.0, kinds=[kind(sessions=Sessions(turns=Lengths(uniform=(1, 5))))]), None),
    ],
)
def test_each_request_ends_once_and_its_tokens_come_in_order(
    tmp_path: Path, scenario: Scenario, gateway: GatewayConfig | None
) -> None:
    found, records = run(tmp_path / "run", scenario, gateway=gateway)

    assert max(Counter(record.index for record in records).values()) == 1
    if scenario.kinds[0].sessions is None:
        assert sorted(record.index for record in records) == list(range(len(records)))
    for record in records:
        assert record.intended_s <= min(record.chunk_s, default=record.intended_s + 1)
        assert record.chunk_s == sorted(record.chunk_s)
        if record.outcome == "finished":
            assert record.tokens == record.wanted_tokens == len(record.chunk_s)
    ledger = json.loads((found.folder / "ledger.json").read_text())
    assert ledger["is_balanced"], ledger["sentences"]
    assert sum(record.outcome == "finished" for record in records) > 20


def test_the_same_seed_gives_the_same_records_and_another_one_other_ones(tmp_path: Path) -> None:
    pool = POOL._replace(autoscale=SCALED)

    texts = []
    for place, seed in enumerate((5, 5, 6)):
        run(tmp_path / f"{place}", load(25.0), [pool], seed=seed)
        texts.append((tmp_path / f"{place}" / "records.jsonl").read_text())

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_a_single_place_waits_as_a_queue_with_one_server_and_constant_service(
    tmp_path: Path, utilisation: float
) -> None:
    service_s = 0.05
    timed = TimedConfig(base_s=service_s, num_blocks=400, max_model_len=2048)
    engine = EngineConfig(runner="timed", max_num_seqs=1, max_batched_tokens=64, timed=timed)
    scenario = Scenario(
        duration_s=None,
        requests=10_000,
        arrivals=Arrivals(rate=utilisation / service_s),
        kinds=[Kind(prompts=Prompts(tokens=Lengths(constant=16)), output_tokens=Lengths(constant=1))],
    )

    found, _ = run(tmp_path / "run", scenario, [POOL._replace(replicas=1, engine=engine)])

    mean_s = service_s + utilisation * service_s / (2 * (1 - utilisation))  # Pollaczek and Khinchine, M/D/1
    assert found.summary.ttft_s.mean == pytest.approx(mean_s, rel=0.07)


def test_the_autoscaler_follows_a_step_and_comes_back(tmp_path: Path) -> None:
    arrivals = Arrivals(process="spike", rate=4.0, to_rate=60.0, at_s=100.0, length_s=100.0)
    scenario = load(4.0, 500.0, arrivals=arrivals)
    pool = POOL._replace(replicas=1, autoscale=SCALED)

    found, _ = run(tmp_path / "run", scenario, [pool], start_jitter=0.2)

    decisions = [json.loads(line) for line in (tmp_path / "run" / "autoscale.jsonl").read_text().splitlines()]
    assert {"deadline", "idle"} <= {decision["reason"] for decision in decisions}
    lives = found.facts.replicas
    assert found.facts.max_replicas["pool"] > 2
    assert all(9 < life.ready_s - life.asked_s < 25 for life in lives[1:] if life.ready_s is not None)
    assert found.facts.replica_seconds["pool"] < found.facts.max_replicas["pool"] * found.facts.ended_s
    observed = [json.loads(line) for line in (tmp_path / "run" / "observed.jsonl").read_text().splitlines()]
    counts = [point["replicas"]["pool/cloud"] for point in observed]
    assert max(counts) > 2 > counts[0]
    assert counts[-1] < max(counts)


@pytest.mark.parametrize("model_error", [0.7, 1.0, 1.3])
def test_the_true_times_do_not_hang_on_the_policys_model(tmp_path: Path, model_error: float) -> None:
    found, records = run(tmp_path / "run", load(2.0), [POOL._replace(replicas=1)], model_error=model_error)

    alone = [record for record in records if record.tpot_s is not None and record.tokens > 5]
    assert min(record.tpot_s or 0.0 for record in alone) == pytest.approx(0.0105, abs=1e-5)
    predicted = [record.predicted_ttft_s or 0.0 for record in records]
    assert min(predicted) >= 0.9 * 0.010 * model_error
    assert found.summary.outcomes.finished == len(records)


def test_a_shared_prefix_is_found_in_the_cache_where_the_mirror_expects_it(tmp_path: Path) -> None:
    prompts = Prompts(tokens=Lengths(constant=200), shared_prefix_tokens=160, prefix_groups=2)

    found, records = run(tmp_path / "run", load(5.0, kinds=[kind(prompts=prompts)]))

    assert found.summary.hit_rate == pytest.approx(0.8, abs=0.03)
    assert {record.cached_tokens for record in records} <= {0, 160}


def test_a_sessions_next_turn_begins_with_its_history(tmp_path: Path) -> None:
    talk = kind(sessions=Sessions(turns=Lengths(constant=3), think_s=Lengths(constant=2)))

    _, records = run(tmp_path / "run", load(0.5, kinds=[talk]), [POOL._replace(replicas=1)])

    by_session: dict[str | None, list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.session or "", record.turn)):
        by_session.setdefault(record.session, []).append(record)
    assert len(by_session) > 10
    for turns in by_session.values():
        assert len(turns) == 3
        for before, after in pairwise(turns):
            known = (before.prompt_tokens or 0) + before.tokens
            assert after.intended_s == pytest.approx((before.end_s or 0.0) + 2, abs=1e-5)
            assert (after.prompt_tokens or 0) > known
            assert after.cached_tokens == (known - 1) // 16 * 16


def test_a_tier_beyond_its_target_spills_into_the_next(tmp_path: Path) -> None:
    edge = POOL._replace(name="edge", tier="edge", replicas=1)

    _, records = run(tmp_path / "run", load(30.0), [POOL, edge], GatewayConfig(ttft_target_s=0.3))

    tiers = Counter((record.tier, record.tier_reason) for record in records)
    assert tiers["edge", "preferred"] > 100
    assert tiers["cloud", "predicted_ttft"] + tiers["cloud", "tier_full"] > 100


def test_by_cost_the_cheapest_pool_in_time_gets_it_and_the_dearer_one_what_that_would_make_late(tmp_path: Path) -> None:
    cheap = POOL._replace(name="cheap", replicas=1, price_per_hour=1.0)
    dear = POOL._replace(name="dear", tier="edge", replicas=2, price_per_hour=4.0)
    unpriced = POOL._replace(name="unpriced", tier="edge", replicas=2)
    policy = TierPolicy.CHEAPEST_WITHIN_TARGET
    gateway = GatewayConfig(ttft_target_s=0.3)
    pools = {}
    for rate in (2.0, 30.0):
        scenario = load(rate, 15.0)
        _, records = run(tmp_path / f"{rate}", scenario, [dear, unpriced, cheap], gateway, tier_policy=policy)
        pools[rate] = Counter(((each.replica or "").rpartition("-")[0], each.tier_reason) for each in records)

    assert pools[2.0].keys() == {("cheap", "cheapest")}
    assert pools[30.0]["cheap", "cheapest"] > 50
    assert pools[30.0]["dear", "predicted_ttft"] + pools[30.0]["dear", "cheapest"] > 50
    assert sum(count for (pool, _), count in pools[30.0].items() if pool == "unpriced") < pools[30.0].total() / 4


def test_each_class_spills_by_its_own_target(tmp_path: Path) -> None:
    targets = ClassTargets(interactive=Target(ttft_s=0.1), batch=Target(ttft_s=1000.0))
    pools = [pool._replace(targets=targets) for pool in (POOL, POOL._replace(name="edge", tier="edge", replicas=1))]
    tenants = [Share(name="quick"), Share(name="slow")]

    _, records = run(
        tmp_path / "run", load(30.0, tenants=tenants), pools, classes={"quick": "interactive", "slow": "batch"}
    )

    spilled = Counter(record.tenant for record in records if record.tier_reason == "predicted_ttft")
    assert spilled["quick"] > 100
    assert spilled["slow"] == 0


def test_a_routing_policy_is_asked_once_for_a_request_that_is_placed_at_once() -> None:
    asked: list[float] = []

    def first(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        asked.append(request.now_s)
        return Decision(views[0].replica_id, Reason.LEAST_LOADED)

    over: list[SimulatedRequest] = []
    simulation = Simulation(
        [POOL], GatewayConfig(), SimulationConfig(), over.append, lambda _: None, Journal(None), routing=first
    )
    simulation.run(draw_plan(load(5.0, 20.0), SegmentMaker), 60.0, 60.0)

    assert len(asked) == len(over) > 50


def test_another_routing_policy_takes_the_place_of_the_gateways() -> None:
    def last(request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        assert request.num_tokens >= len(request.keys) * request.block_size
        return Decision(max(view.replica_id for view in views), Reason.LEAST_LOADED)

    replicas: list[str | None] = []
    for routing in (last, None):
        taken: set[str | None] = set()
        simulation = Simulation(
            [POOL],
            GatewayConfig(),
            SimulationConfig(),
            lambda request, taken=taken: taken.add(request.replica),
            lambda _: None,
            Journal(None),
            routing=routing,
        )
        simulation.run(draw_plan(load(5.0, 20.0), SegmentMaker), 60.0, 60.0)
        replicas.append(",".join(sorted(str(each) for each in taken)))

    assert replicas == ["pool-2", "pool-1,pool-2"]


SHARING = Prompts(tokens=Lengths(lognormal=(300, 900), max=1500), shared_prefix_tokens=200)


def test_the_gateways_tables_give_the_records_that_views_one_by_one_give(tmp_path: Path) -> None:
    pool, scenario = POOL._replace(replicas=6), load(40.0, 10.0, kinds=[kind(prompts=SHARING)])
    one_by_one = Searching(search, max_viewed=10**6)

    told: list[list[object]] = []
    for searching in (one_by_one, IN_ARRAYS, open_search()):
        taken: list[object] = []
        simulation = Simulation(
            [pool],
            GatewayConfig(),
            SimulationConfig(seed=3),
            lambda each, taken=taken: taken.append((each.arrival, each.replica, each.end_s)),
            lambda _: None,
            Journal(None),
            routing=production(Random("ties 3"), searching),
        )
        simulation.run(draw_plan(scenario, SegmentMaker), 60.0, 60.0)
        told.append(taken)

    assert told[0] == told[1] == told[2]
    assert len(told[0]) > 300
    assert len({replica for _, replica, _ in told[0]}) == 6


@pytest.mark.parametrize(
    ("num_replicas", "rate", "duration_s"), [(6, 40.0, 12.0), pytest.param(24, 160.0, 70.0, marks=pytest.mark.slow)]
)
def test_recorded_decisions_are_those_of_the_full_search(num_replicas: int, rate: float, duration_s: float) -> None:
    compared = ComparedDecisions("ties 0")
    pool, scenario = POOL._replace(replicas=num_replicas), load(rate, duration_s, kinds=[kind(prompts=SHARING)])
    simulation = Simulation(
        [pool], GatewayConfig(), SimulationConfig(), lambda _: None, lambda _: None, Journal(None), routing=compared
    )
    simulation.run(draw_plan(scenario, SegmentMaker), 60.0, 60.0)

    assert compared.num_decided >= 0.9 * rate * duration_s
    assert compared.equal >= 0.999
    assert max(compared.costs) <= 1.03


@pytest.mark.parametrize(
    ("scenario", "pool", "error", "message"),
    [
        (load(1.0, loop="closed"), POOL, ScenarioInvalid, "loop is closed"),
        (load(1.0), POOL._replace(engine=EngineConfig()), ConfigError, r"engine.runner is torch"),
        (load(1e-6), POOL, ScenarioInvalid, "Nothing was sent"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_sentence(
    tmp_path: Path, scenario: Scenario, pool: SimulatedPool, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path / "run", scenario, [pool])


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    run(tmp_path / "run", load(2.0, 5.0))

    with pytest.raises(ConfigError, match="holds a run already"):
        run(tmp_path / "run", load(2.0, 5.0))
