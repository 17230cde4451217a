from collections import Counter as Tally

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from penstock.router.completions.goodput.busiest import OTHER, REVIEW_S
from penstock.router.completions.goodput.outcome import Outcome
from penstock.router.completions.goodput.tenant_counts import TenantCounts

CALLS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(Outcome), st.floats(0, REVIEW_S)), max_size=200)


def make() -> tuple[TenantCounts, Counter]:
    counter = Counter("t", "help", ("tenant", "outcome"), registry=CollectorRegistry())
    return TenantCounts(counter, num_named=2), counter


def shown(counter: Counter) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["tenant"], sample.labels["outcome"]): sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name == "t_total"
    }


@given(CALLS)
def test_no_series_goes_backwards_and_every_request_counts_once(calls: list[tuple[int, Outcome, float]]) -> None:
    counts, counter = make()
    now, before, latest = 0.0, dict[tuple[str, str], float](), dict[tuple[str, str], float]()
    rises: Tally[str] = Tally()

    for tenant, outcome, after_s in calls:
        now += after_s
        counts.record(f"t{tenant}", outcome, now)
        found = shown(counter)
        for series, value in found.items():
            assert value >= latest.get(series, 0.0)
            rises[series[1]] += int(value - latest.get(series, 0.0))
        assert len({tenant for tenant, _ in found} - {OTHER}) <= 2
        before, latest = found, latest | found

    assert rises == Tally(outcome.value for _, outcome, _ in calls)
    assert set(before) <= set(latest)


def test_a_tenant_that_comes_back_goes_on_where_it_stood() -> None:
    counts, counter = make()
    for _ in range(4):
        counts.record("a", Outcome.MET, 0.0)
    for at_s in range(1, 12):
        for name in ("b", "c"):
            for _ in range(20):
                counts.record(name, Outcome.MET, at_s * (REVIEW_S + 1))
    gone = shown(counter)
    for at_s in range(12, 20):
        for _ in range(500):
            counts.record("a", Outcome.MET, at_s * (REVIEW_S + 1))

    assert ("a", "met") not in gone
    assert 4 < shown(counter)["a", "met"] < 4 + 8 * 500, "what came meanwhile is the others'"
