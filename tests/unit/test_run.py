"""tests.run: which calls of pytest `make test` makes."""

import pytest

from tests.run import ALL, runs


@pytest.mark.parametrize("arguments", [[], ["--allowed-skips=tests/allowed_skips.txt"], ["-x", "--durations=5"]])
def test_all_tests_are_two_runs_with_the_same_options(arguments: list[str]) -> None:
    assert runs(arguments) == [[*which, *arguments] for which in ALL]


@pytest.mark.parametrize(
    "arguments",
    [["-k", "queue"], ["tests/unit/router"], ["tests/unit/test_run.py::test_any", "-x"], ["--lf"], ["-m", "platform"]],
)
def test_what_chooses_tests_is_one_run_as_it_is(arguments: list[str]) -> None:
    assert runs(arguments) == [arguments]
