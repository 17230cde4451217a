from penstock.router.config import PoolSpec
from penstock.router.models.request_targets import find_targets
from penstock.wire.targets import ClassTargets, GatewayTargets, Target

PLATFORM = GatewayTargets(ClassTargets(interactive=Target(ttft_s=0.5, tpot_s=0.05)), 0.95)


def pool(name: str, served: str, targets: ClassTargets) -> PoolSpec:
    return PoolSpec(
        name=name,
        served_names=(served, "both"),
        tier="edge",
        model="m",
        app_name=f"pool-{name}",
        max_model_len=1,
        targets=targets,
    )


def test_a_models_targets_are_those_that_its_pools_agree_on() -> None:
    small = ClassTargets(interactive=Target(tpot_s=0.02), batch=Target(ttft_s=60.0))
    large = ClassTargets(interactive=Target(tpot_s=0.04), batch=Target(ttft_s=60.0))

    found = find_targets([pool("a", "small", small), pool("b", "large", large)], PLATFORM, 2.0)

    assert found.objective == 0.95
    assert found.find("small", "interactive") == Target(ttft_s=0.5, tpot_s=0.02)
    assert found.find("large", "interactive") == Target(ttft_s=0.5, tpot_s=0.04)
    assert found.find("both", "interactive") == Target(ttft_s=0.5, tpot_s=0.05), "they do not agree"
    assert found.find("both", "batch") == Target(ttft_s=60.0)
    assert found.find("small", "standard") == found.find(None, "batch") == Target(ttft_s=2.0)
