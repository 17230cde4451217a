import pytest

from penstock.workers.compute.models.replay import sizes


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (5, [1, 2, 4, 8]),
        (64, [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]),
        (65, [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96]),
    ],
)
def test_recordings_fill_a_step_up_by_half_at_most_and_hold_every_number_of_rows(
    most: int, expected: list[int]
) -> None:
    assert sizes(most) == expected
