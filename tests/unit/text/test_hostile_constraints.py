"""Each hostile constraint is refused in time, or followed with a bounded effort for each token, or ends its own answer
with an error that names the limit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.support.hostile_constraints import HOSTILE
from tests.yardstick import YARDSTICK_S

ROOT = Path(__file__).resolve().parents[3]
CHECK_S = 0.1
"""CPU time of the check that a gateway makes."""
TOKEN_S = 0.06
"""CPU time of a mask and its token."""
RSS_BYTES = 128 * 2**20
SLACK = 4
"""Factor that one measurement beside other tests gets, by the yardstick."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.hostile_constraints"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    return {line["name"]: line for line in lines if "check_s" in line}


def test_there_are_fifty() -> None:
    assert len(HOSTILE) >= 50


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_costs_little(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[name]
    slack = SLACK * found["yardstick_s"] / YARDSTICK_S

    assert found["check_s"] < CHECK_S * slack, found
    assert found["rss_bytes"] < RSS_BYTES, found
    assert found["slowest_s"] < TOKEN_S * slack, found
    assert found["compile_s"] < CHECK_S * slack, found
    for sentence in (found["error"], found["fault"]):
        assert sentence is None or (len(sentence) < 500 and sentence.endswith(".")), found
