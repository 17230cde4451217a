from pathlib import Path

import pytest

from penstock.workers.compute.kernels import build
from penstock.workers.compute.kernels.build import build_levels
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.prebuilt import LEVELS, cpu_flags, find


@pytest.fixture
def built(tmp_path: Path) -> Path:
    for level in LEVELS:
        (tmp_path / f"{level}.so").touch()
    return tmp_path


@pytest.mark.parametrize(("level", "flags"), LEVELS.items())
def test_a_cpu_gets_the_best_level_that_it_has(built: Path, level: str, flags: frozenset[str]) -> None:
    assert find(flags | {"sse", "another"}, built) == built / f"{level}.so"


def test_a_cpu_below_every_level_gets_none(built: Path) -> None:
    assert find(LEVELS["x86_64_v3"] - {"fma"}, built) is None


def test_a_level_that_was_not_built_is_passed_over(built: Path) -> None:
    (built / "x86_64_v4.so").unlink()

    assert find(LEVELS["x86_64_v4"], built) == built / "x86_64_v3.so"


def test_a_checkout_has_none() -> None:
    assert find(cpu_flags()) is None


@pytest.mark.slow
def test_what_is_built_ahead_loads_where_the_cpu_has_its_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build, "FLAGS", (*(flag for flag in build.FLAGS if flag != "-O3"), "-O0", "-fno-sanitize=undefined")
    )  # quick
    paths = build_levels(tmp_path / "prebuilt")
    usable = find(cpu_flags(), tmp_path / "prebuilt")

    assert [path.stem for path in paths] == list(LEVELS)
    assert usable is not None
    assert Library(usable).path == usable
