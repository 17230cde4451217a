"""bench.quality and bench.quantize: when they fail, that is bounds on what roundings cost, and on what AWQ gets
back."""

import pytest

from bench.quality import W4A8, W4A16, Comparison, cost_rows
from bench.quantize import is_good, recovered
from bench.support.report import Row


@pytest.mark.parametrize(
    ("rounded", "most", "is_met"), [(10.04, 0.5, True), (10.06, 0.5, False), (9.9, 0.5, True), (20.0, None, True)]
)
def test_a_rounding_may_cost_so_many_percent_and_no_more(rounded: float, most: float | None, is_met: bool) -> None:
    comparison = Comparison(W4A8, W4A16, most)

    rows = list(cost_rows(comparison, {W4A8: {"text": rounded}, W4A16: {"text": 10.0}}))

    assert all(met for _, met in rows) == is_met
    assert rows[0][0] == Row(
        "perplexity on text: int8 activations (ours), bfloat16 activations (rival)", rounded, 10.0, ""
    )
    assert rows[1][0].ours == pytest.approx(10 * (rounded - 10))


@pytest.mark.parametrize(
    ("shares", "is_met"),
    [
        ({128: (20.0, 40.0), 64: (21.0, 41.0)}, True),
        ({128: (19.9, 40.0), 64: (21.0, 41.0)}, False),
        ({128: (30.0, 40.0), 64: (31.0, 40.0)}, False),
        ({64: (25.0, 25.0)}, True),
    ],
)
def test_awq_gets_a_fifth_of_the_loss_back_and_more_in_smaller_groups(
    shares: dict[int, tuple[float, float]], is_met: bool
) -> None:
    rows = [
        Row(recovered(name, size), share, None, "%")
        for size, found in shares.items()
        for name, share in zip("ab", found, strict=True)
    ]

    assert is_good(rows, "ab", shares) == is_met
