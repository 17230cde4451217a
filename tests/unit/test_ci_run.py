"""What .ci/run installs before it tests, with stand-ins for the system's programs."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
REAL = ("bash", "dirname", "mktemp", "realpath", "rm", "sed")
STAND_INS = {
    "apt-get": 'echo "apt-get $*" >>"$CALLS"',
    "apt-cache": '[ -z "$HAS_NO_CHROMIUM" ]',
    "curl": "",
    "id": 'echo "$USER_ID"',
    "make": 'echo "make $*" >>"$CALLS"',
    "python3": "",
}
"""Programs by name, each a line of shell."""


def calls_of(folder: Path, programs: tuple[str, ...] = (), **environment: str) -> list[str]:
    """What the script calls on a machine that has these programs too."""
    tools, checkout = folder / "bin", folder / "checkout"
    tools.mkdir()
    for name in REAL:
        path = shutil.which(name)
        assert path is not None
        (tools / name).symlink_to(path)
    for name, line in STAND_INS.items() | dict.fromkeys(programs, "").items():
        (tools / name).write_text(f"#!{tools}/bash\n{line}\n")
        (tools / name).chmod(0o755)
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    calls = folder / "calls"
    known = {"PATH": str(tools), "CALLS": str(calls), "USER_ID": "0", "HAS_NO_CHROMIUM": "", "TMPDIR": str(folder)}
    subprocess.run(
        [str(tools / "bash"), str(checkout / ".ci" / "run")], env=known | environment, check=True, capture_output=True
    )
    return calls.read_text().splitlines()


def installed(calls: list[str]) -> list[str]:
    return [call.split("--no-install-recommends ")[1] for call in calls if call.startswith("apt-get install")]


def test_a_browser_is_installed_where_there_is_none(tmp_path: Path) -> None:
    calls = calls_of(tmp_path)

    assert installed(calls) == ["chromium"]
    assert [call.split()[2] for call in calls if call.startswith("make")] == ["check", "test", "test-slow"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_browser_that_is_there_is_used(tmp_path: Path, program: str) -> None:
    assert installed(calls_of(tmp_path, (program,))) == []


@pytest.mark.parametrize(
    "environment", [{"USER_ID": "1000"}, {"HAS_NO_CHROMIUM": "1"}, {"PENSTOCK_TEST_CHROMIUM": "/opt/chromium"}]
)
def test_where_none_can_be_installed_or_one_is_named_the_tests_run_all_the_same(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    calls = calls_of(tmp_path, **environment)

    assert installed(calls) == []
    assert any(call.split()[:3] == ["make", "--no-print-directory", "test"] for call in calls)
