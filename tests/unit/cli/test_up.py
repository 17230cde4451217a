"""What `penstock up` says when it answers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.progress import Progress
from penstock.cli.up import announcement

KEY = "sk-penstock-" + "a" * 48
ENV = Path(".penstock/env")


class Output(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_knows_whether_a_person_reads_it(is_terminal: bool) -> None:
    assert Progress(Console(file=Output(is_terminal))).is_terminal == is_terminal


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_that_is_to_have_colours_is_no_terminal(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI sets these for the colours; its log is kept, and must not have the key."""
    monkeypatch.setenv(variable, "1")

    assert not Progress(Console(file=Output(is_terminal=False))).is_terminal


def test_a_terminal_gets_the_key_and_a_command_to_try_it() -> None:
    said = announcement("http://127.0.0.1:8000", "demo", ENV, KEY, 16.2)

    assert said.count(KEY) == 2
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in said


def test_what_is_no_terminal_gets_the_place_of_the_key_instead() -> None:
    said = announcement("http://127.0.0.1:8000", "demo", ENV, None, 16.2)

    assert "sk-penstock" not in said
    assert ". .penstock/env" in said
    assert said.endswith("Ctrl-C stops it.")
