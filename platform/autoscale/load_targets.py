"""The targets that a pool's load asks for, by the classes of what came lately. Pure.

Invariant: the strictest target of any class that came counts, since a replica computes all classes' sequences in one
batch and a prompt waits for whatever is before it. A class that names none has the pool's own setting.
"""

from collections.abc import Sequence

import msgspec

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.demand import Sample, sum_flows
from penstock.wire.targets import CLASSES, ClassTargets, Target, same_for_all


def with_targets(settings: AutoscaleConfig, targets: ClassTargets, samples: Sequence[Sample]) -> AutoscaleConfig:
    """The settings with the targets of the load. targets: those that are named. samples: of a window; the first one's
    gains are from before it. Where nothing was placed within it, every class may be what waits."""
    own = Target(ttft_s=settings.ttft_target_s, tpot_s=settings.tpot_target_s)
    wanted = targets.or_else(same_for_all(own))
    flow = sum_flows([sample.flow for sample in samples[1:]])
    counts = {"interactive": flow.num_interactive, "standard": flow.num_standard, "batch": flow.num_batch}
    present = [name for name, count in counts.items() if count > 0] or CLASSES
    ttft_s, tpot_s = wanted.strictest_ttft_s(present), wanted.strictest_tpot_s(present)
    assert ttft_s is not None
    assert tpot_s is not None
    if (ttft_s, tpot_s) == (own.ttft_s, own.tpot_s):
        return settings
    return msgspec.structs.replace(settings, ttft_target_s=ttft_s, tpot_target_s=tpot_s)
