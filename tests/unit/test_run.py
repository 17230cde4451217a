"""tests.run: which calls of pytest `make test` and `make test-slow` make."""

import pytest

from tests.run import ALL, SLOW, runs


@pytest.mark.parametrize("arguments", [[], ["--allowed-skips=tests/allowed_skips.txt"], ["-x", "--durations=5"]])
def test_all_tests_are_two_runs_with_the_same_options(arguments: list[str]) -> None:
    assert runs(arguments) == [[*which, *arguments] for which in ALL]


@pytest.mark.parametrize("arguments", [[], ["--allowed-skips=tests/allowed_skips.txt"], ["-x", "--durations=5"]])
def test_slow_tests_are_two_runs_with_the_same_options(arguments: list[str]) -> None:
    assert runs(["--slow", *arguments]) == [[*which, *arguments] for which in SLOW]


def test_a_budget_bounds_the_slow_integration_tests_and_begins_with_another_file_each_turn() -> None:
    unit, integration = runs(["--slow", "--budget", "900", "-x"], now_s=1000.0, turn=7)

    assert unit == [*SLOW[0], "-x"]
    assert integration == [*SLOW[1], "-x", "--until=1900.0", "--turn=7"]


@pytest.mark.parametrize("arguments", [["--slow", "--budget"], ["--slow", "--budget", "soon"]])
def test_a_budget_is_a_number(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="float"):
        runs(arguments)


def test_each_test_is_in_one_of_the_two() -> None:
    assert [which[which.index("-m") + 1] for which in ALL] == ["not slow"] * 2
    assert {which[which.index("-m") + 1] for which in SLOW} == {"slow"}
    assert {name for which in ALL for name in which if "/" in name} == {
        name for which in SLOW for name in which if "/" in name
    }


@pytest.mark.parametrize(
    "arguments",
    [["-k", "queue"], ["tests/unit/router"], ["tests/unit/test_run.py::test_any", "-x"], ["--lf"], ["-m", "platform"]],
)
def test_what_chooses_tests_is_one_run_as_it_is(arguments: list[str]) -> None:
    assert runs(arguments) == [arguments]
