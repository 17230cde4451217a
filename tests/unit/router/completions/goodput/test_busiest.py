from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.goodput.busiest import OTHER, REVIEW_S, WATCHED_PER_NAME, BusiestTenants


def test_the_first_tenants_have_labels_as_long_as_there_are_any() -> None:
    tenants = BusiestTenants(2)

    assert [tenants.count(name, 0.0) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]


def test_a_tenant_that_is_much_busier_gets_the_label_of_the_quietest_at_a_review() -> None:
    tenants = BusiestTenants(2)
    for name in ("a", "b", *("a" for _ in range(9)), *("c" for _ in range(8))):
        tenants.count(name, 1.0)

    assert tenants.count("c", REVIEW_S - 1) == OTHER
    assert tenants.count("c", REVIEW_S + 1) == "c"
    assert tenants.named == {"a", "c"}
    assert tenants.count("b", REVIEW_S + 1) == OTHER


def test_two_that_are_as_busy_do_not_take_turns() -> None:
    tenants = BusiestTenants(1)
    for at_s in range(0, 10_000, 10):
        assert tenants.count("a", float(at_s)) == "a"
        assert tenants.count("b", float(at_s)) == OTHER


def test_yesterdays_load_fades() -> None:
    tenants = BusiestTenants(1)
    for _ in range(1000):
        tenants.count("old", 0.0)
    for review in range(1, 12):
        for _ in range(10):
            tenants.count("new", review * (REVIEW_S + 1))

    assert tenants.named == {"new"}


def test_a_tenant_of_that_id_has_no_label_of_its_own() -> None:
    tenants = BusiestTenants(4)
    for at_s in range(0, 2000, 100):
        assert tenants.count(OTHER, float(at_s)) == OTHER

    assert tenants.named == set()


@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0, 120)), max_size=400))
def test_memory_is_bounded_and_a_label_is_ones_own_or_the_others(calls: list[tuple[int, float]]) -> None:
    tenants, now = BusiestTenants(3), 0.0
    for tenant, after_s in calls:
        now += after_s
        assert tenants.count(f"t{tenant}", now) in (f"t{tenant}", OTHER)
        assert len(tenants.named) <= 3
        assert len(tenants._counts) <= 3 * WATCHED_PER_NAME
