from hypothesis import given
from hypothesis import strategies as st

from penstock_loadtest.workload.hit_rate import measure_hit_rate, measure_hit_rate_of_ids


def test_only_leading_blocks_hit() -> None:
    assert measure_hit_rate_of_ids([[1, 2, 3], [1, 9, 3], [1, 9, 3]]) == 4 / 9


def test_the_same_block_behind_another_prefix_is_no_hit() -> None:
    assert measure_hit_rate_of_ids([[1, 2], [3, 2], [2]]) == 0


def test_a_trace_without_blocks_has_a_hit_rate_of_0() -> None:
    assert measure_hit_rate_of_ids([[], []]) == 0


def test_the_last_block_counts_though_it_is_not_full_and_is_equal_only_at_the_same_length() -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3]]

    assert measure_hit_rate(prompts, 4) == (2 + 1) / 7


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8), st.integers(1, 4))
def test_token_prompts_hit_as_the_longest_common_prefix_says(prompts: list[list[int]], size: int) -> None:
    hits = total = 0
    for place, prompt in enumerate(prompts):
        blocks = [prompt[at : at + size] for at in range(0, len(prompt), size)]
        total += len(blocks)
        hits += max(
            (_common(blocks, [e[at : at + size] for at in range(0, len(e), size)]) for e in prompts[:place]), default=0
        )

    assert measure_hit_rate(prompts, size) == (hits / total if total else 0)


def _common(a: list[list[int]], b: list[list[int]]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count
