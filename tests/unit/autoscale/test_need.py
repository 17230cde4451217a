"""What a pool needs: the wait for the first token, by the least busy replica."""

from random import Random

import pytest

from penstock.autoscale.need import _least
from penstock.perf.model import Work, predict_ttft_s
from penstock.wire.frames import StepCosts

COSTS = StepCosts(
    base_s=0.02, row_s=0.0005, prefill_token_s=0.0004, attention_s=1e-8, kv_token_s=5e-7, sampled_row_s=1e-4
)


@pytest.mark.parametrize("seed", range(20))
def test_the_soonest_first_token_is_on_a_replica_that_no_other_is_below_in_everything(seed: int) -> None:
    random = Random(seed)
    works = [
        Work(random.randint(0, 16), 0, random.choice((0, random.randint(1, 4000))), random.randint(0, 30000), 0)
        for _ in range(64)
    ]

    least = _least(works)

    assert set(least) <= set(works)
    assert len(least) < len(works) / 2
    for tokens in (32, 512):
        assert min(predict_ttft_s(COSTS, work, 900, 100, tokens) for work in least) == pytest.approx(
            min(predict_ttft_s(COSTS, work, 900, 100, tokens) for work in works), rel=1e-6
        )
