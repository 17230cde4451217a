import pytest

from tests.skips import Skip, parse, unlisted


def test_a_line_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="tests/gpu"):
        parse("# comment\n\ntests/gpu/*\n")


def test_an_entry_covers_a_test_only_with_its_reason() -> None:
    allowed = parse("tests/gpu/* | no CUDA device *\n")
    skipped = [
        Skip("tests/gpu/test_a.py::test_b[1]", "no CUDA device here"),
        Skip("tests/gpu/test_a.py::test_b[2]", "flaky"),
    ]

    assert unlisted(skipped, allowed) == [skipped[1]]


def test_brackets_of_parameters_are_literal() -> None:
    skipped = [Skip("a.py::t[x]", "why"), Skip("a.py::tx", "why")]

    assert unlisted(skipped, parse("a.py::t[x] | why")) == [skipped[1]]
