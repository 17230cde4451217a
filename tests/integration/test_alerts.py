"""`bench.alerts` in short: a platform that is well raises no alert, a provider that fails its own and none else, and a
gateway that stands still is missed."""

import asyncio
from pathlib import Path

import pytest

from bench.alerts import FAULTS, run
from bench.support.prometheus_server import NoPrometheus, find_prometheus

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(600)]

SCALE = 30.0
CHOSEN = ("nothing", "a provider fails", "the gateway stands still")


def test_each_fault_raises_its_alerts_and_none_else(tmp_path: Path) -> None:
    try:
        find_prometheus()
    except NoPrometheus as missing:
        pytest.skip(str(missing))
    faults = tuple(fault for fault in FAULTS if fault.name in CHOSEN)

    outcomes, _ = asyncio.run(run(tmp_path, SCALE, faults, None))

    assert [outcome.fault.name for outcome in outcomes] == list(CHOSEN)
    assert [each for outcome in outcomes for each in outcome.faults] == []
