"""First tokens that would come too late, and what does not count as late."""

from random import Random

import pytest

from penstock.perf.model import Work, predict_ttft_s
from penstock.router.dispatch.overdue import is_late
from penstock.router.routing.policy import Decision, Reason, ReplicaView, UnreportedWork, choose
from penstock.wire.frames import Load, StepCosts

COSTS = StepCosts(base_s=0.02, prefill_token_s=0.001)


def decide(
    num_tokens: int,
    cached: int,
    outstanding: int,
    scored: int = 0,
    adapter_load_s: float = 0.0,
    row_hold_s: float = 0.0,
) -> Decision:
    load = Load("epoch", 0, 8, 1, 0, outstanding, 0, 1000, 1000, COSTS, 512, max_running=1, row_hold_s=row_hold_s)
    view = ReplicaView("a", "pool", load, UnreportedWork(), 0, 16, 8192, cached, adapter_load_s)
    return choose(num_tokens, 10.0, [view], Random(0), scored)


@pytest.mark.parametrize(("num_tokens", "cached"), [(10, 0), (5000, 0), (5000, 4992)])
@pytest.mark.parametrize(
    ("waited_s", "outstanding", "expected"), [(0.9, 0, False), (0.2, 1600, True), (0.2, 400, False), (1.1, 0, True)]
)
def test_the_wait_and_the_prompts_before_it_count_and_not_what_the_prompt_takes_alone(
    num_tokens: int, cached: int, waited_s: float, outstanding: int, expected: bool
) -> None:
    assert is_late(decide(num_tokens, cached, outstanding), waited_s, 1.0) is expected


def test_loading_its_adapter_and_scoring_its_prompt_belong_to_what_it_takes_alone() -> None:
    decision = decide(900, 0, 100, scored=900, adapter_load_s=2.0)
    assert decision.predicted_ttft_s is not None
    assert decision.predicted_ttft_s > 2.0 + predict_ttft_s(COSTS, Work(), 900, 0, 512, 900)

    assert not is_late(decision, 0.5, 1.0)
    assert is_late(decision, 0.95, 1.0)


def test_the_wait_for_a_row_is_predicted_but_no_reason_to_be_placed_later() -> None:
    prompt_s = decide(900, 0, 100).predicted_ttft_s
    decision = decide(900, 0, 100, row_hold_s=3.0)
    assert prompt_s is not None
    assert decision.predicted_ttft_s == pytest.approx(3.0 + prompt_s)

    assert not is_late(decision, 0.5, 1.0)
    assert is_late(decision, 0.95, 1.0)


def test_where_nothing_is_predicted_the_wait_counts() -> None:
    assert not is_late(Decision("a", Reason.ONLY_REPLICA), 0.9, 1.0)
    assert is_late(Decision("a", Reason.ONLY_REPLICA), 1.1, 1.0)
