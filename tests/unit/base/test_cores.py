import os
from pathlib import Path

import pytest

from penstock.base.cores import available_cores


@pytest.mark.parametrize(
    ("content", "expected"),
    [("50000 100000\n", 1), ("100000 100000\n", 1), ("max 100000\n", None), ("garbage", None), (None, None)],
)
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, content: str | None, expected: int | None) -> None:
    path = tmp_path / "cpu.max"
    if content is not None:
        path.write_text(content, encoding="ascii")

    assert available_cores(path) == (expected or len(os.sched_getaffinity(0)))
