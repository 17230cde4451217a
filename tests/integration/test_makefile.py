"""The actions of `make`, by its own account (`make -n`): a second start installs nothing, a changed list of packages
does."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout as `make test` leaves it: everything is installed, and the stamps say so."""
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / ".venv").mkdir()
    for second, name in enumerate(
        ("pyproject.toml", "constraints.txt", ".venv/.installed", ".venv/.installed-loadtest", ".venv/.installed-dev")
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 + second, 1e9 + second))
    return tmp_path


def plan(checkout: Path, target: str) -> str:
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }  # `make test` may have called us
    return subprocess.run(
        ["make", "-n", target], cwd=checkout, env=variables, capture_output=True, text=True, timeout=30, check=True
    ).stdout


@pytest.mark.parametrize("target", ["up", "loadtest", "test", "test-slow", "check", "docs", "clients", "bench-prefix"])
def test_what_is_installed_is_not_installed_again(checkout: Path, target: str) -> None:
    planned = plan(checkout, target)

    assert ".venv/bin/" in planned
    assert "pip" not in planned


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_changed_list_of_packages_is_installed(checkout: Path, changed: str) -> None:
    (checkout / changed).touch()

    assert "pip --disable-pip-version-check --no-input install" in plan(checkout, "up")
