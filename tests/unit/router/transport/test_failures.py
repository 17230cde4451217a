import pytest

from penstock.router.transport.failures import (
    ADDRESS_BURST,
    ADDRESS_RATE,
    GATEWAY_BURST,
    GATEWAY_RATE,
    MAX_DELAY_S,
    Failures,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_few_failures_of_an_address_are_answered_at_once_and_more_ever_later() -> None:
    subject = Failures(Clock())

    assert [subject.count("a") for _ in range(int(ADDRESS_BURST))] == [0.0] * int(ADDRESS_BURST)
    assert subject.count("a") == pytest.approx(1 / ADDRESS_RATE)
    assert subject.count("a") == pytest.approx(2 / ADDRESS_RATE)
    assert max(subject.count("a") for _ in range(1000)) == pytest.approx(MAX_DELAY_S)


def test_failures_of_one_address_do_not_slow_those_of_another() -> None:
    subject = Failures(Clock())
    for _ in range(50):
        subject.count("a")

    assert subject.count("b") == 0


def test_an_address_is_forgiven_with_time() -> None:
    clock = Clock()
    subject = Failures(clock)
    for _ in range(1000):
        subject.count("a")
    clock.now_s += MAX_DELAY_S + ADDRESS_BURST / ADDRESS_RATE

    assert subject.count("a") == 0


def test_failures_of_no_known_address_are_slowed_together_only() -> None:
    clock = Clock()
    subject = Failures(clock)

    assert max(subject.count(None) for _ in range(int(GATEWAY_BURST))) == pytest.approx(0, abs=1e-6)
    assert subject.count(None) == pytest.approx(1 / GATEWAY_RATE)
