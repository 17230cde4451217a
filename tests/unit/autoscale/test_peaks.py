from hypothesis import given
from hypothesis import strategies as st

from penstock.autoscale.peaks import Peak, highest, note_peak

KEEP_S = 20.0


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 30)), min_size=1, max_size=80))
def test_the_highest_is_that_of_all_numbers_within_the_time(steps: list[tuple[int, int]]) -> None:
    everything: list[Peak] = []
    peaks: tuple[Peak, ...] = ()
    now = 0.0
    for gap_s, replicas in steps:
        now += gap_s
        everything.append(Peak(now, replicas))
        peaks = note_peak(peaks, everything[-1], KEEP_S)

        assert highest(peaks, now, KEEP_S) == max(peak.replicas for peak in everything if now - peak.at_s <= KEEP_S)
        assert len(peaks) <= 31, "no two of the same size"


def test_of_nothing_the_highest_is_none() -> None:
    assert highest((), 5.0, KEEP_S) == 0
