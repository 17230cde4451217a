"""What a gateway may give out of a budget while Redis is away. The ledger: tests/integration/test_budgets."""

from penstock.tenancy.charges import ASIDE_LEASES, Charges

LEASE_MS = 15_000


def test_what_is_set_aside_is_given_out_once_and_for_as_long_as_redis_holds_it() -> None:
    charges = Charges("aside:one", limit_nano=1000)
    assert not charges.may_begin_alone(1, now_ms=0)

    charges.confirm_aside(10, asked_ms=500, lease_ms=LEASE_MS)
    ends_ms = 500 + ASIDE_LEASES * LEASE_MS
    assert charges.may_begin_alone(10, ends_ms - 1)
    assert not charges.may_begin_alone(11, ends_ms - 1)
    charges.begin_alone("r", 7, ends_ms - 1, is_full=False)

    assert charges.may_begin_alone(3, ends_ms - 1)
    assert not charges.may_begin_alone(4, ends_ms - 1)
    assert not charges.may_begin_alone(1, ends_ms)
    assert charges.may_begin_alone(0, ends_ms), "what costs nothing needs no budget"


def test_an_answer_of_redis_that_is_lost_does_not_prolong_what_is_set_aside() -> None:
    charges = Charges("aside:one", limit_nano=1000)
    charges.confirm_aside(10, asked_ms=0, lease_ms=LEASE_MS)
    charges.ask_aside(20)

    assert charges.may_begin_alone(10, ASIDE_LEASES * LEASE_MS - 1)
    assert not charges.may_begin_alone(11, ASIDE_LEASES * LEASE_MS - 1)
    assert not charges.may_begin_alone(1, ASIDE_LEASES * LEASE_MS)
