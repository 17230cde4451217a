import math

import pytest

from penstock.base.errors import ConfigError
from penstock.tenancy.share import DEFAULT_CLASS, SERVICE_CLASSES
from penstock.wire.targets import CLASSES, NO_TARGETS, ClassTargets, Target, TargetsConfig, same_for_all


def test_there_are_targets_for_each_class_of_tenants() -> None:
    assert CLASSES == SERVICE_CLASSES


def test_a_class_that_only_a_later_version_knows_has_the_default_ones_target() -> None:
    targets = ClassTargets(**{DEFAULT_CLASS: Target(ttft_s=3.0)}, batch=Target(ttft_s=9.0))

    assert targets.of("premium") == targets.of(DEFAULT_CLASS) == Target(ttft_s=3.0)
    assert targets.of("or_else") == Target(ttft_s=3.0), "a method is no class"
    assert targets.of("batch") == Target(ttft_s=9.0)


def test_what_a_pool_names_wins_field_by_field() -> None:
    pool = ClassTargets(interactive=Target(tpot_s=0.02))
    platform = ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.05), batch=Target(ttft_s=60.0))
    gateway = same_for_all(Target(ttft_s=2.0))

    found = pool.or_else(platform).or_else(gateway)

    assert found == ClassTargets(
        interactive=Target(ttft_s=0.5, tpot_s=0.02), standard=Target(ttft_s=2.0), batch=Target(ttft_s=60.0)
    )
    assert NO_TARGETS.or_else(platform) == platform.or_else(NO_TARGETS) == platform


def test_the_strictest_target_is_that_of_the_classes_asked_for() -> None:
    targets = ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.05), batch=Target(ttft_s=0.2, tpot_s=0.5))

    assert targets.strictest_tpot_s(CLASSES) == 0.05
    assert targets.strictest_tpot_s(["batch", "standard"]) == 0.5
    assert targets.strictest_tpot_s(["standard"]) is targets.strictest_tpot_s([]) is None
    assert targets.strictest_ttft_s(CLASSES) == 0.2
    assert targets.strictest_ttft_s(["interactive", "standard"]) == 0.5
    assert targets.strictest_ttft_s(["standard"]) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("field", ["ttft_s", "tpot_s"])
def test_a_time_that_is_no_number_of_seconds_above_0_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^targets\.batch\.{field} must be a number of seconds above 0, .* not "):
        TargetsConfig(batch=Target(**{field: value}))


@pytest.mark.parametrize("objective", [0.0, 1.0, -0.5, math.nan, 99.0])
def test_an_objective_that_leaves_nothing_to_miss_or_to_meet_is_refused(objective: float) -> None:
    with pytest.raises(ConfigError, match=r"^targets\.objective is a share of requests"):
        TargetsConfig(objective=objective)


def test_batch_rows_yield_to_the_other_classes_that_have_a_time_per_token() -> None:
    targets = ClassTargets(interactive=Target(tpot_s=0.05), standard=Target(ttft_s=1.0), batch=Target(tpot_s=1.0))

    assert targets.paced_classes == {"interactive"}
    assert NO_TARGETS.paced_classes == frozenset()
