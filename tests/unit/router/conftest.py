"""Fixtures of the router's tests."""

from collections.abc import Iterator

import pytest

from tests.unit.router.traces import Traces


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.tracing.close()
