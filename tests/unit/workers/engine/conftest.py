"""Running engines, for the tests of the engine."""

from collections.abc import Iterator

import pytest

from tests.unit.workers.engine.houses import Device, Gate, House


@pytest.fixture
def houses() -> Iterator[list[House]]:
    """Engines to stop at the end, with nothing held."""
    opened: list[House] = []
    yield opened
    for house in opened:
        house.stop()


@pytest.fixture(params=[Gate, Device])
def house(houses: list[House], request: pytest.FixtureRequest) -> House:
    houses.append(House(request.param()))
    return houses[0]


@pytest.fixture(params=[Gate, Device])
def gated(houses: list[House], request: pytest.FixtureRequest) -> House:
    """A running engine whose steps wait for `runner.passes`."""
    houses.append(House(request.param(is_open=False)))
    return houses[0]
