import pytest
from msgspec import structs

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import Sample
from penstock.autoscale.load_targets import with_targets
from penstock.wire.scaling import PoolFlow
from penstock.wire.targets import NO_TARGETS, ClassTargets, Target

SETTINGS = AutoscaleConfig(ttft_target_s=1.0, tpot_target_s=0.1)
TARGETS = ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.05), batch=Target(ttft_s=60.0, tpot_s=0.5))


def samples(interactive: int = 0, standard: int = 0, batch: int = 0) -> list[Sample]:
    """A window in which so many sequences were placed; before it others were."""
    flow = PoolFlow(num_started=interactive + standard + batch, num_interactive=interactive, num_batch=batch)
    return [
        Sample(0.0, PoolFlow(num_started=9, num_interactive=9), 0),
        Sample(1.0, flow, 0),
        Sample(2.0, PoolFlow(), 0),
    ]


def found(targets: ClassTargets, window: list[Sample]) -> tuple[float, float]:
    settings = with_targets(SETTINGS, targets, window)
    assert structs.replace(settings, ttft_target_s=1.0, tpot_target_s=0.1) == SETTINGS, "nothing else is changed"
    return settings.ttft_target_s, settings.tpot_target_s


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (samples(batch=5), (60.0, 0.5)),
        (samples(standard=5), (1.0, 0.1)),
        (samples(standard=5, batch=5), (1.0, 0.1)),
        (samples(interactive=1, batch=500), (0.5, 0.05)),
        (samples(), (0.5, 0.05)),
        ([], (0.5, 0.05)),
    ],
)
def test_the_strictest_target_of_the_classes_that_came_counts(
    window: list[Sample], wanted: tuple[float, float]
) -> None:
    assert found(TARGETS, window) == wanted


def test_where_nothing_is_named_the_pools_own_settings_count() -> None:
    assert found(NO_TARGETS, samples(interactive=1, standard=1, batch=1)) == (1.0, 0.1)
    assert found(ClassTargets(interactive=Target(tpot_s=0.02)), samples(interactive=1)) == (1.0, 0.02)


def test_a_gateway_that_tells_no_classes_has_the_default_ones_load() -> None:
    window = [Sample(0.0, PoolFlow(), 0), Sample(1.0, PoolFlow(num_started=4), 0)]

    assert found(TARGETS, window) == (1.0, 0.1)
