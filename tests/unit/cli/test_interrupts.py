import signal
from collections.abc import Iterator

import pytest

from penstock.cli.interrupts import SIGNALS, Interrupted, Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}  # CI may run under nohup
    yield Interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_to_stop_and_the_second_to_hurry(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.install()

    with pytest.raises(Interrupted):
        signal.raise_signal(number)
    assert not interrupts.hurry.is_set()
    signal.raise_signal(number)

    assert interrupts.hurry.is_set()


def test_once_stopping_nothing_is_interrupted(interrupts: Interrupts) -> None:
    interrupts.install()
    interrupts.begin_stopping()

    signal.raise_signal(signal.SIGTERM)

    assert interrupts.hurry.is_set()


def test_a_hang_up_that_nohup_ignores_stays_ignored(interrupts: Interrupts) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    interrupts.install()

    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
