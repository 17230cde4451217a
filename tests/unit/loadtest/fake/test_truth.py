import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.fake.behaviour import Behaviour, Fault, Replicas, Stall
from penstock_loadtest.fake.truth import (
    compute_quantile,
    count_replicas,
    draw_answer_length,
    draw_fault,
    program_chunks,
    shift_past_stalls,
)
from penstock_loadtest.scenario import Lengths


def drawn(lengths: Lengths) -> Any:
    rng = random.Random(1)
    return np.array([compute_quantile(lengths, rng.random()) for _ in range(20_000)])


def test_draws_have_the_named_distribution() -> None:
    lognormal, uniform = drawn(Lengths(lognormal=(0.1, 0.9))), drawn(Lengths(uniform=(2.0, 4.0)))
    choices = drawn(Lengths(choices=[1.0, 1.0, 5.0]))

    assert np.quantile(lognormal, [0.5, 0.99]) == pytest.approx([0.1, 0.9], rel=0.1)
    assert np.quantile(uniform, [0.0, 0.5, 1.0]) == pytest.approx([2.0, 3.0, 4.0], rel=0.02)
    assert np.mean(choices == 5.0) == pytest.approx(1 / 3, abs=0.02)
    assert set(drawn(Lengths(uniform=(0.0, 10.0), min=3, max=4))) >= {3.0, 4.0}
    assert compute_quantile(Lengths(constant=7), 0.9) == 7


@given(
    tokens=st.integers(1, 100),
    size=st.tuples(st.integers(1, 5), st.integers(1, 9)).map(sorted),
    per=st.sampled_from(["request", "token"]),
    key=st.integers(0, 2**60),
    uncached=st.integers(0, 1000),
)
def test_chunks_hold_all_tokens_in_order_of_time(
    tokens: int, size: list[int], per: Any, key: int, uncached: int
) -> None:
    sizes = Lengths(uniform=(size[0], size[1]))
    behaviour = Behaviour(
        ttft_s=Lengths(uniform=(0.1, 0.2)),
        gap_s=Lengths(uniform=(0.01, 0.02)),
        gap_per=per,
        tokens_per_chunk=sizes,
        prompt_token_s=0.001,
    )
    chunks = program_chunks(behaviour, key, tokens=tokens, uncached_tokens=uncached)

    assert sum(chunk.tokens for chunk in chunks) == tokens
    assert 0.1 <= chunks[0].offset_s - 0.001 * uncached <= 0.2
    for before, after in pairwise(chunks):
        assert 0.01 * after.tokens - 1e-9 <= after.offset_s - before.offset_s <= 0.02 * after.tokens + 1e-9
    assert chunks == program_chunks(behaviour, key, tokens=tokens, uncached_tokens=uncached)


def test_a_longer_answer_begins_as_a_shorter_one() -> None:
    behaviour = Behaviour(gap_s=Lengths(uniform=(0.01, 0.02)), gap_per="token")

    assert program_chunks(behaviour, 4, tokens=20, uncached_tokens=0)[:10] == program_chunks(
        behaviour, 4, tokens=10, uncached_tokens=0
    )


def test_lengths_are_drawn_only_of_answers_that_may_end_early() -> None:
    behaviour = Behaviour(output_tokens=Lengths(uniform=(0, 10)))
    lengths = {draw_answer_length(behaviour, key, max_tokens=6, ignore_eos=False) for key in range(100)}

    assert lengths == {1, 2, 3, 4, 5, 6}
    assert draw_answer_length(behaviour, 1, max_tokens=6, ignore_eos=True) == 6


@given(
    stalls=st.lists(st.builds(Stall, from_s=st.floats(0, 10), for_s=st.floats(0.01, 5)), max_size=4),
    due=st.lists(st.floats(-1, 20), min_size=2, max_size=2).map(sorted),
)
def test_a_stall_keeps_order_and_sends_nothing_while_it_lasts(stalls: list[Stall], due: list[float]) -> None:
    early, late = (shift_past_stalls(stalls, at) for at in due)

    assert early <= late
    assert early >= due[0]
    assert early == shift_past_stalls(stalls, early)
    assert not any(stall.from_s <= early < stall.from_s + stall.for_s for stall in stalls)


def test_faults_are_named_or_drawn_and_only_hit_what_can_have_them() -> None:
    faults = [Fault(kind="hang", share=0.2), Fault(kind="no_done", share=0.3, numbers=[7])]
    behaviour = Behaviour(faults=faults)
    kinds = [
        None if (fault := draw_fault(behaviour, number, stream=True)) is None else fault.kind for number in range(2000)
    ]

    assert kinds[7] == "no_done"
    assert kinds.count("hang") / 2000 == pytest.approx(0.2, abs=0.03)
    assert kinds.count("no_done") / 2000 == pytest.approx(0.3, abs=0.03)
    assert draw_fault(behaviour, 7, stream=False) is None
    assert draw_fault(Behaviour(), 7, stream=True) is None


def test_replicas_change_over_time_by_pool_and_tier() -> None:
    entries = [Replicas(count=1), Replicas(count=4, from_s=10), Replicas(count=2, pool="gpu", tier="cloud", from_s=5)]

    assert count_replicas(entries, 0.0) == {("fake", "edge"): 1, ("gpu", "cloud"): 2}
    assert count_replicas(entries, 10.0) == {("fake", "edge"): 4, ("gpu", "cloud"): 2}
