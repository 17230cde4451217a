from penstock.autoscale.observation import ReplicaSnapshot
from penstock.autoscale.victim import choose_victims
from penstock.wire.frames import Load, StepCosts


def seen(name: str, *, blocks: int = 0, hits: int = 0, running: int = 0) -> ReplicaSnapshot:
    return ReplicaSnapshot(name, Load("e", 0, 4, running, 0, 0, 0, 10, 10, StepCosts(), 512), 16, blocks, hits)


def test_the_cache_that_saved_least_lately_goes_first() -> None:
    replicas = [seen("old", blocks=9, hits=9000), seen("new", blocks=90, hits=500)]

    assert choose_victims(["old", "new"], replicas, {"old": 8900, "new": 0}, 1) == ("old",)


def test_of_caches_that_saved_the_same_the_smaller_goes_then_the_less_loaded() -> None:
    replicas = [seen("a", blocks=5, running=1), seen("b", blocks=2, running=9), seen("c", blocks=2, running=3)]

    assert choose_victims(["a", "b", "c"], replicas, {}, 2) == ("c", "b")


def test_one_that_no_gateway_knows_goes_before_all_others() -> None:
    assert choose_victims(["a", "b"], [seen("b")], {}, 1) == ("a",)


def test_of_equals_the_newest_goes() -> None:
    assert choose_victims(["old", "middle", "new"], [], {}, 2) == ("new", "middle")


def test_there_are_no_more_victims_than_replicas() -> None:
    assert choose_victims(["a"], [], {}, 3) == ("a",)
    assert choose_victims([], [], {}, 1) == ()
