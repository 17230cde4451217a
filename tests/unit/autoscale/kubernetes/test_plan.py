from itertools import product

from penstock.autoscale.kubernetes.plan import Change, patch_of, plan
from penstock.autoscale.kubernetes.resources import Group, Pod
from penstock.wire.serve_agent import AppPlaces, Place


def pod(name: str, is_ready: bool = True, is_ending: bool = False) -> Pod:
    """Named p1, p2, ... by age; its address is that of its name."""
    return Pod(
        name,
        "rc",
        "pool-a",
        f"2026-01-01T00:00:{int(name[1:]):02d}Z",
        f"ip-{name}" if is_ready else None,
        is_ready,
        is_ending,
    )


def pool(target: int, *places: tuple[str, str | None]) -> AppPlaces:
    return AppPlaces(
        "pool-a", target, [Place(f"r{number}", state, address) for number, (state, address) in enumerate(places)]
    )


def running(*names: str) -> list[tuple[str, str | None]]:
    return [("RUNNING", f"ip-{name}") for name in names]


def group(replicas: int, to_delete: tuple[str, ...] = (), least: int = 0, most: int = 100) -> Group:
    return Group(1, "pool-a", replicas, least, most, to_delete)


def test_pods_are_added_at_once_for_a_higher_target() -> None:
    assert plan(group(1), [pod("p1")], pool(4, *running("p1"))) == Change(group(1), 4, ())


def test_a_pod_is_not_named_before_its_victim_has_ended() -> None:
    pods = [pod("p1"), pod("p2")]

    assert plan(group(2), pods, pool(1, *running("p1"), ("STOPPING", "ip-p2"))) is None
    assert plan(group(2), pods, pool(1, *running("p1"))) == Change(group(2), 1, ("p2",))


def test_a_replica_on_its_way_out_is_no_reason_for_a_new_pod() -> None:
    """A rollout: the old one drains where the new one will live."""
    assert plan(group(1), [pod("p1")], pool(1, ("STOPPING", "ip-p1"), ("STARTING", None))) is None


def test_pods_that_are_not_there_yet_go_first_then_the_newest() -> None:
    pods = [pod("p1"), pod("p2"), pod("p3"), pod("p4", is_ready=False), pod("p5", is_ready=False)]

    change = plan(group(5), pods, pool(2, *running("p1")))

    assert change == Change(group(5), 2, ("p5", "p4", "p3"))


def test_a_pod_that_is_going_already_is_not_counted_again() -> None:
    pods = [pod("p1"), pod("p2"), pod("p3", is_ending=True)]

    assert plan(group(1, to_delete=("p2", "p0")), pods, pool(1, *running("p1"))) is None
    seen = group(2, to_delete=("p3",))
    assert plan(seen, pods, pool(1, *running("p1"))) == Change(seen, 1, ("p3", "p2"))


def test_names_of_pods_that_are_gone_are_forgotten() -> None:
    change = plan(group(1, to_delete=("p7", "p8")), [pod("p1"), pod("p8")], pool(2, *running("p1")))

    assert change == Change(group(1, to_delete=("p7", "p8")), 2, ("p8",))


def test_what_somebody_else_wrote_is_put_back() -> None:
    three = [pod("p1"), pod("p2"), pod("p3")]

    assert plan(group(1), three, pool(3, *running("p1", "p2", "p3"))) == Change(group(1), 3, ())
    assert plan(group(9), three, pool(3, *running("p1", "p2", "p3"))) is None, (
        "all pods are in use, and nothing goes unnamed"
    )
    assert plan(
        group(5), [*three, pod("p4"), pod("p5", is_ready=False)], pool(3, *running("p1", "p2", "p3"))
    ) == Change(group(5), 3, ("p5", "p4"))


def test_kuberays_own_bounds_are_kept() -> None:
    """KubeRay clamps counts, and would otherwise delete and make the same pod for ever."""
    assert plan(group(2, most=3), [pod("p1"), pod("p2")], pool(5, *running("p1", "p2"))) == Change(
        group(2, most=3), 3, ()
    )
    assert plan(group(2, least=2), [pod("p1"), pod("p2")], pool(1, *running("p1"))) is None


def test_in_every_small_case_only_empty_pods_go_and_what_is_wanted_stays() -> None:
    """All cases of three pods, each empty, running, stopping, not ready or ending; every target and every number of
    replicas."""
    for kinds in product(("empty", "running", "stopping", "unready", "ending"), repeat=3):
        pods = [
            pod(f"p{place}", is_ready=kind != "unready", is_ending=kind == "ending") for place, kind in enumerate(kinds)
        ]
        places: list[tuple[str, str | None]] = [
            (kind.upper(), f"ip-p{place}") for place, kind in enumerate(kinds) if kind in ("running", "stopping")
        ]
        for target, replicas in product(range(5), range(5)):
            change = plan(group(replicas), pods, pool(target, *places))
            if change is None:
                continue
            by_name = {pod.name: kind for pod, kind in zip(pods, kinds, strict=True)}
            assert {by_name[name] for name in change.to_delete} <= {"empty", "unready"}, "no pod with a replica goes"
            assert change.replicas >= min(target, 4)
            assert (
                change.replicas == target
                if change.replicas > replicas
                else replicas - change.replicas == len(change.to_delete) > 0
            )
            after = plan(
                change.group._replace(replicas=change.replicas, to_delete=change.to_delete), pods, pool(target, *places)
            )
            assert after is None or after.replicas < change.replicas, "it does not go back and forth"


def test_a_patch_applies_to_what_was_seen_only() -> None:
    going = group(3, to_delete=("p1",))

    assert patch_of([Change(group(3), 2, ("p2",)), Change(going, 1, ("p1", "p2"))]) == [
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "pool-a"},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/replicas", "value": 3},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 2},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/scaleStrategy", "value": {"workersToDelete": ["p2"]}},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/groupName", "value": "pool-a"},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/replicas", "value": 3},
        {"op": "test", "path": "/spec/workerGroupSpecs/1/scaleStrategy/workersToDelete", "value": ["p1"]},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/replicas", "value": 1},
        {"op": "add", "path": "/spec/workerGroupSpecs/1/scaleStrategy", "value": {"workersToDelete": ["p1", "p2"]}},
    ]


def test_pods_that_were_refused_are_given_up_first_and_nobody_is_named_for_them() -> None:
    pods = [pod("p1"), pod("p2"), pod("p3")]

    assert plan(group(5), pods, pool(3, *running("p1", "p2", "p3")), is_refused=True) == Change(group(5), 3, ())
    assert plan(group(5), pods, pool(3, *running("p1", "p2", "p3"))) is None, "they may be on their way"
    assert plan(group(5), pods, pool(4, *running("p1", "p2", "p3")), is_refused=True) == Change(group(5), 4, ())
    assert plan(group(5), pods, pool(2, *running("p1", "p2")), is_refused=True) == Change(group(5), 2, ("p3",))


def test_a_pod_that_is_named_already_is_none_that_was_refused() -> None:
    pods = [pod("p1"), pod("p2")]

    assert plan(group(1, ("p2",)), pods, pool(1, *running("p1")), is_refused=True) is None
