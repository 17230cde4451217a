"""docs/security.md promises nothing that no test holds."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows of the tables of promises: the promise, and the file and name of each test."""
    section = page.partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [(row[0].strip(), NAMED.findall(row[1])) for row in rows if row[0].strip(" -") not in ("", "promise")]


def missing(tests: list[tuple[str, str]]) -> list[str]:
    """Names of tests that do not exist."""
    return [f"{file}::{test}" for file, test in tests if test not in _functions(ROOT / file)]


def _functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_names_a_test_and_every_test_exists() -> None:
    found = promises(PAGE)

    assert len(found) >= 30
    assert [promise for promise, tests in found if not tests] == []
    assert [name for _, tests in found for name in missing(tests)] == []


@pytest.mark.parametrize(
    "test", ["tests/unit/test_security_page.py::test_nothing", "tests/unit/test_no_file.py::test_any"]
)
def test_a_test_that_is_not_there_is_noticed(test: str) -> None:
    page = f"## What is promised\n| promise | tests |\n|---|---|\n| All. | `{test}` |\n\n## What is not promised\n"

    assert [missing(tests) for _, tests in promises(page)] == [[test]]


def test_a_promise_without_a_test_is_noticed() -> None:
    page = "## What is promised\n| promise | tests |\n|---|---|\n| All. | none |\n\n## What is not promised\n"

    assert promises(page) == [("All.", [])]
