"""Redis scripts stand in `.lua` files, each beside the one module that loads it, and are packaged with it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "platform").rglob("*.lua"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_one_module_in_its_folder_loads_the_script(script: Path) -> None:
    call = f'with_name("{script.name}").read_text'
    loaders = [path for path in (ROOT / "platform").rglob("*.py") if call in path.read_text(encoding="utf-8")]

    assert [path.parent for path in loaders] == [script.parent]


def test_no_module_holds_a_script_in_a_string() -> None:
    assert SCRIPTS
    assert [
        path.name for path in (ROOT / "platform").rglob("*.py") if "redis.call(" in path.read_text(encoding="utf-8")
    ] == []


def test_the_scripts_are_packaged() -> None:
    """The wheel takes every file below `platform` that git does not ignore."""
    ignored = subprocess.run(["git", "check-ignore", *SCRIPTS], cwd=ROOT, capture_output=True, check=False, text=True)

    assert ignored.stdout == ""
