"""docs/planning.md: every command is run as it stands there, and its output compared."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from tests.documents import Step, matches, steps

ROOT = Path(__file__).parents[4]
STEPS = steps((ROOT / "docs" / "planning.md").read_text(encoding="utf-8"))
SLOW = ("--simulate", "cpu")
"""Arguments that take seconds."""


def as_parameter(step: Step) -> object:
    is_slow = any(word in SLOW for word in shlex.split(step.command))
    return pytest.param(step, id=f"line {step.line}", marks=[pytest.mark.slow] if is_slow else [])


def test_the_page_has_a_plan_for_an_8b_on_one_card_and_a_70b_on_two() -> None:
    commands = [step.command for step in STEPS]

    assert any("llama-3-8b --gpu H100 --count 1 --slo" in command for command in commands)
    assert any("llama-3-70b --gpu H100 --count 2" in command for command in commands)
    assert all(command.startswith("penstock plan ") for command in commands)


@pytest.mark.parametrize("step", [as_parameter(step) for step in STEPS])
def test_a_command_says_what_the_page_shows(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    result = CliRunner().invoke(app, shlex.split(step.command)[1:])

    assert result.exit_code == 0, result.output
    assert step.expected
    assert matches(step.expected, result.output), result.output
