"""Docstrings stand alone: each is a sentence or a noun phrase, none begins with a bare preposition, pronoun or
conjunction."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPOSITIONS = (
    "about above according across after against along among around as at before behind below beneath beside besides"
    " between beyond but by down during except for from in inside into like near of off on onto out over past per"
    " since than through throughout till to toward towards under until up upon via with within without"
)
PRONOUNS = (
    "he her hers him his i it its me my our ours she that their theirs them these they this those us we which who whom"
    " whose you your"
)
CONJUNCTIONS = "although and because if lest nor once or so though unless when whereas while yet"
REFUSED = frozenset(f"{PREPOSITIONS} {PRONOUNS} {CONJUNCTIONS}".split())
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def is_refused(text: str) -> bool:
    """Whether a docstring leans on something outside of itself. A name in backticks, a number or a sign begins well."""
    found = WORD.match(text.strip())
    return found is not None and found[0].split("'")[0].lower() in REFUSED


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands as a statement: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def refused(root: Path, names: list[str]) -> list[str]:
    """`file:line: first words` of each docstring that is refused."""
    return [
        f"{name}:{line}: {text.strip()[:60]!r}"
        for name in names
        for line, text in docstrings(ast.parse((root / name).read_text(encoding="utf-8")))
        if is_refused(text)
    ]


def test_no_docstring_begins_with_a_bare_preposition_pronoun_or_conjunction() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())

    assert len(names) > 300
    assert refused(ROOT, names) == []


@pytest.mark.parametrize(
    "text",
    [
        "Of its route.",
        "Which tier answers.",
        "As they travel.",
        "It has ended.",
        "If there is room.",
        "\n  For /metrics.",
    ],
)
def test_what_leans_on_something_else_is_refused(text: str) -> None:
    assert is_refused(text)


@pytest.mark.parametrize(
    "text", ["Index of the model; 0 is the first.", "What a request asks for.", "`of` a kind.", "", "None: no limit."]
)
def test_what_stands_alone_is_not(text: str) -> None:
    assert not is_refused(text)
