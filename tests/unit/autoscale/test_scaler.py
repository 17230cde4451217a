import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs
from ray.exceptions import RayError
from redis.exceptions import ConnectionError as RedisAway

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.journal import Journal
from penstock.autoscale.observation import ServeState
from penstock.autoscale.observe import AgedReport
from penstock.autoscale.scaler import ScaledPool, Scaler
from penstock.wire.frames import Load, StepCosts
from penstock.wire.scaling import GatewayReport, PoolFlow, PoolReport, ReplicaReport, Targets
from penstock.wire.targets import NO_TARGETS, ClassTargets, Target, same_for_all

COSTS = StepCosts(base_s=0.02, row_s=0.001)
SETTINGS = AutoscaleConfig(max_replicas=3, scale_down_delay_s=5.0, window_s=3.0)


def busy(queued: int, names: Sequence[str] = ("r1",), blocks: Sequence[int] = (0, 0, 0), pool: str = "a") -> AgedReport:
    replicas = [
        ReplicaReport(name, pool, Load("e", 0, 4, 8 if queued else 0, 0, 0, 800, 100, 2048, COSTS, 512), 16, held, 0)
        for name, held in zip(names, blocks, strict=False)
    ]
    return AgedReport(GatewayReport("g", 1, [PoolReport(pool, PoolFlow(), queued, queued / 4)], replicas), 0.1)


@dataclass
class Source:
    reports: list[AgedReport] = field(default_factory=list)
    published: list[Targets] = field(default_factory=list)
    is_unavailable: bool = False

    async def read(self) -> Sequence[AgedReport]:
        if self.is_unavailable:
            raise RedisAway("away")
        return self.reports

    async def publish(self, targets: Targets) -> None:
        if self.is_unavailable:
            raise RedisAway("away")
        self.published.append(targets)


@dataclass
class Serve:
    """What Serve runs: targets are met at once, victims take until `gone`."""

    serve_states: dict[str, ServeState]
    calls: list[tuple[object, ...]] = field(default_factory=list)
    fails: bool = False
    refuses: bool = False
    is_unavailable: bool = False

    async def read(self) -> dict[str, ServeState]:
        if self.is_unavailable:
            raise ValueError("Failed to look up actor")
        return self.serve_states

    async def set_target(self, pool: str, target: int) -> None:
        if self.fails:
            raise RayError("the controller is away")
        self.calls.append(("set", pool, target))
        before = self.serve_states[pool]
        names = tuple(f"r{number + 1}" for number in range(target))
        self.serve_states[pool] = ServeState(target, names if target > before.target else before.running[:target])

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        if self.refuses:
            return False
        self.calls.append(("down", pool, victims, target))
        before = self.serve_states[pool]
        self.serve_states[pool] = ServeState(
            target, tuple(name for name in before.running if name not in victims), num_stopping=len(victims)
        )
        return True

    def gone(self, pool: str) -> None:
        self.serve_states[pool] = self.serve_states[pool]._replace(num_stopping=0)


@dataclass
class Rig:
    source: Source
    serve: Serve
    journal: Path | None = None
    settings: AutoscaleConfig = SETTINGS
    targets: ClassTargets = NO_TARGETS
    now: float = 0.0

    def __post_init__(self) -> None:
        pools = [
            ScaledPool(name, f"pool-{name}", 8, self.settings, targets=self.targets) for name in self.serve.serve_states
        ]
        self.scaler = Scaler(
            "autoscaler-1",
            pools,
            self.source,
            self.serve,
            Journal(self.journal),
            lambda: self.now,
            lambda: 1000.0 + self.now,
        )

    def reconcile(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            asyncio.run(self.scaler.reconcile())


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_queue_is_answered_with_replicas_and_told_to_gateways(tmp_path: Path) -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}), tmp_path / "log.jsonl")

    rig.reconcile()

    assert rig.serve.calls == [("set", "a", 3)]
    (row,) = rig.source.published[-1].pools
    assert (row.pool, row.target, row.reasons) == ("a", 3, {"deadline": 1})
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["was"], line["target"], line["reason"], line["outcome"]) == (1, 3, "deadline", "applied")


def test_the_same_queue_is_in_time_for_a_load_that_asks_for_less() -> None:
    rig = Rig(
        Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}), targets=same_for_all(Target(ttft_s=1000.0))
    )

    rig.reconcile()

    assert rig.serve.calls == []
    (explanation,) = rig.source.published[-1].explanations
    assert explanation.ttft_target_s == 1000.0


def test_the_replicas_that_hold_least_are_those_that_go() -> None:
    names = ("r1", "r2", "r3")
    rig = Rig(Source([busy(0, names, (9, 2, 5))]), Serve({"a": ServeState(3, names)}))

    rig.reconcile(20)

    assert rig.serve.calls == [("down", "a", ("r2", "r3"), 1)]
    rig.serve.gone("a")
    rig.reconcile(20)
    assert len(rig.serve.calls) == 1


def test_replicas_that_are_still_starting_go_before_any_that_runs() -> None:
    rig = Rig(Source([busy(0)]), Serve({"a": ServeState(3, ("r1",), num_starting=2)}))

    rig.reconcile(9)

    assert rig.serve.calls == [("set", "a", 1)]


def test_a_dry_run_only_says_what_it_would_do(tmp_path: Path) -> None:
    settings = AutoscaleConfig(max_replicas=3, dry_run=True)
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}), tmp_path / "log.jsonl", settings)

    rig.reconcile(3)

    assert rig.serve.calls == []
    assert {line["outcome"] for line in lines(tmp_path / "log.jsonl")} == {"dry run"}
    assert rig.source.published[-1].pools[0].target == 3


def test_while_redis_is_away_nothing_changes(tmp_path: Path) -> None:
    rig = Rig(
        Source([busy(queued=40)], is_unavailable=True),
        Serve({"a": ServeState(2, ("r1", "r2"))}),
        tmp_path / "log.jsonl",
    )

    rig.reconcile(30)

    assert rig.serve.calls == []
    (line,) = lines(tmp_path / "log.jsonl")
    assert (line["reason"], line["age_s"]) == ("stale", None)
    rig.source.is_unavailable = False
    rig.reconcile()
    assert rig.serve.calls == [("set", "a", 3)]


def test_while_serves_controller_is_away_nothing_changes_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}, is_unavailable=True))

    with caplog.at_level("INFO", "penstock.autoscale"):
        rig.reconcile(5)
        rig.serve.is_unavailable = False
        rig.reconcile(2)

    assert rig.serve.calls == [("set", "a", 3)]
    assert [record.message for record in caplog.records if "reached" in record.message] == [
        "not reached",
        "reached again",
    ]


def test_an_event_log_that_can_not_be_written_keeps_no_pool_from_its_turn(tmp_path: Path) -> None:
    rig = Rig(
        Source([busy(queued=40), busy(queued=40, pool="b")]),
        Serve({"a": ServeState(1, ("r1",)), "b": ServeState(1, ("r1",))}),
        tmp_path,
    )

    rig.reconcile()

    assert {call[1] for call in rig.serve.calls} == {"a", "b"}


def test_a_pool_that_could_not_be_changed_is_decided_on_anew(tmp_path: Path) -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}, fails=True), tmp_path / "log.jsonl")

    rig.reconcile()
    rig.serve.fails = False
    rig.reconcile(9)

    assert ("set", "a", 3) in rig.serve.calls
    assert lines(tmp_path / "log.jsonl")[0]["outcome"] == "failed"


def test_a_step_down_that_serve_refuses_is_noted(tmp_path: Path) -> None:
    rig = Rig(
        Source([busy(0, ("r1", "r2"))]), Serve({"a": ServeState(2, ("r1", "r2"))}, refuses=True), tmp_path / "log.jsonl"
    )

    rig.reconcile(9)

    assert lines(tmp_path / "log.jsonl")[-1]["outcome"] == "refused"
    assert rig.serve.serve_states["a"].target == 2


def test_a_pool_that_serve_does_not_know_is_left_alone() -> None:
    rig = Rig(Source([busy(queued=40)]), Serve({"a": ServeState(1, ("r1",))}))
    rig.serve.serve_states = {}

    rig.reconcile()

    assert rig.serve.calls == []


def test_the_log_has_a_line_for_what_changes_only(tmp_path: Path) -> None:
    rig = Rig(Source([busy(0)]), Serve({"a": ServeState(1, ("r1",))}), tmp_path / "log.jsonl")

    rig.reconcile(20)

    assert [line["reason"] for line in lines(tmp_path / "log.jsonl")] == ["unknown", "steady"]


def test_what_was_held_for_a_first_replica_asks_for_no_second_one_when_it_is_there() -> None:
    settings = structs.replace(SETTINGS, min_replicas=0, start_s=10.0)
    cold = AgedReport(GatewayReport("g", 1, [PoolReport("a", PoolFlow(), 2, 30.0)], []), 0.1)
    rig = Rig(Source([cold]), Serve({"a": ServeState(0, ())}), settings=settings)

    rig.reconcile()
    rig.serve.serve_states["a"] = ServeState(1, (), num_starting=1)
    rig.reconcile(30)
    rig.serve.serve_states["a"] = ServeState(1, ("r1",))
    warm = busy(queued=2)
    rig.source.reports = [warm._replace(report=structs.replace(warm.report, pools=cold.report.pools))]
    rig.reconcile(2)

    assert rig.serve.calls == [("set", "a", 1)]
    assert rig.source.published[0].pools[0].ready_in_s == 10.0
    assert rig.source.published[-3].pools[0].ready_in_s == 0.0, "it is late"
    assert rig.source.published[-1].pools[0].ready_in_s == 10.0, "it is there; another would take as long"


def budget_rig(first: ServeState, second: ServeState, queued: tuple[int, int]) -> Rig:
    """Two pools, of which `a` comes first, under a budget of 4 GPUs."""
    rig = Rig(
        Source([busy(queued[0], first.running), busy(queued[1], second.running, pool="b")]),
        Serve({"a": first, "b": second}),
    )
    reports = [structs.replace(report.report, gateway=f"g{number}") for number, report in enumerate(rig.source.reports)]
    rig.source.reports = [AgedReport(report, 0.1) for report in reports]
    pools = [
        ScaledPool("a", "pool-a", 8, structs.replace(SETTINGS, priority=1), gpus=1),
        ScaledPool("b", "pool-b", 8, SETTINGS, gpus=1),
    ]
    rig.scaler = Scaler(
        "autoscaler-1", pools, rig.source, rig.serve, Journal(None), lambda: rig.now, lambda: rig.now, budget_gpus=4
    )
    return rig


def test_a_pool_that_comes_first_gets_what_another_one_gives_up_once_it_is_free() -> None:
    rig = budget_rig(ServeState(1, ("r1",)), ServeState(3, ("r1", "r2", "r3")), queued=(40, 40))

    rig.reconcile()
    assert rig.serve.calls == [("down", "b", ("r3", "r2"), 1)], "and nothing for a while the two still stop"
    rig.reconcile(3)
    assert len(rig.serve.calls) == 1
    rig.serve.gone("b")
    rig.reconcile()

    assert rig.serve.calls[1:] == [("set", "a", 3)]
    explained = {each.pool: each for each in rig.source.published[-1].explanations}
    assert (explained["b"].most, explained["b"].most_reason, explained["b"].changes[-1].reason) == (
        1,
        "budget",
        "budget",
    )


def test_pools_without_need_keep_what_they_have_under_a_budget() -> None:
    rig = budget_rig(ServeState(1, ("r1",)), ServeState(3, ("r1", "r2", "r3")), queued=(0, 40))

    rig.reconcile(3)

    assert rig.serve.calls == []


def test_gpus_of_a_pool_that_serve_does_not_know_are_not_given_away() -> None:
    rig = budget_rig(ServeState(1, ("r1",)), ServeState(3, ("r1", "r2", "r3")), queued=(40, 0))
    del rig.serve.serve_states["b"]

    rig.reconcile(3)

    assert rig.serve.calls == [], "it may have as many as its bounds allow"
