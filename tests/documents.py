"""Commands in Markdown, with the output that a reader is shown: found, and compared with what came.

A ```console block is a terminal: a line behind `$ ` is a command, one behind `> ` its continuation, `^C` an interrupt,
and what follows is its output. In a table, the cell under "one command" is a command. Three or more dots stand for any
text, as in doctest; what differs from run to run (keys, ids, fractions, dates) is masked on both sides, so that
documents can show real output.

Decisions: docs/decisions/tests.md
"""

import re
from typing import NamedTuple

INTERRUPT = "^C"
COMMAND_COLUMN = "one command"
BLOCKS = {"console", "mermaid"}
"""Kinds of blocks a document of commands may have: in any other one a command would hide."""
_FENCE = re.compile(r"^```(\w*)$")
_MASKS = (
    (re.compile(r"sk-penstock-[\w-]+"), "KEY"),
    (re.compile(r"\b(?:[0-9a-f]{12,}|fp_[0-9a-f_]+)\b"), "ID"),
    (re.compile(r"(replica\"?: ?\"?)[a-z0-9]{8}\b"), r"\1REPLICA"),
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?"), "DATE"),
    (re.compile(r"(\"created\":)\d+"), r"\1SECONDS"),
    (re.compile(r"(?<![\d.])(?<!} )\d+\.\d+(?!\.?\d)"), "FRACTION"),  # but a value on /metrics is compared
    (re.compile(r"after \d+ s\b"), "after SECONDS"),
    (re.compile(r"[ \t\r]+$", re.MULTILINE), ""),
)


class Step(NamedTuple):
    """expected: its output as shown; None: none is shown. line: of the document, from 1."""

    command: str
    expected: str | None
    line: int


class CommandHidden(Exception):
    """A block of a kind in which commands would not be found."""


def steps(markdown: str) -> list[Step]:
    """Commands of all console blocks, in order. Raises CommandHidden."""
    found: list[Step] = []
    kind: str | None = None
    for number, line in enumerate(markdown.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is not None:
            kind = (fence[1] or "none") if kind is None else None
            if kind is not None and kind not in BLOCKS:
                raise CommandHidden(f"line {number}: a block of kind {kind}, not one of {', '.join(sorted(BLOCKS))}")
        elif kind == "console":
            _take(found, line, number)
    return found


def _take(found: list[Step], line: str, number: int) -> None:
    if line.startswith("$ ") or line == INTERRUPT:
        found.append(Step(line.removeprefix("$ "), "", number))
    elif line.startswith("> ") and not found[-1].expected:
        found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line.removeprefix('> ')}")
    else:
        found[-1] = found[-1]._replace(expected=f"{found[-1].expected}{line}\n")


def table_commands(markdown: str) -> list[Step]:
    """Commands of all tables with the column "one command", in order: what stands in backquotes there."""
    found: list[Step] = []
    column: int | None = None
    for number, line in enumerate(markdown.splitlines(), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if COMMAND_COLUMN in cells:
            column = cells.index(COMMAND_COLUMN)
        elif not cells:
            column = None
        elif column is not None and "`" in cells[column]:
            found.append(Step(cells[column].strip("`").replace(r"\|", "|"), None, number))
    return found


def masked(text: str) -> str:
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text.strip()


def matches(expected: str, actual: str) -> bool:
    parts = [re.escape(part) for part in re.split(r"\.{3,}", masked(expected))]
    return re.fullmatch(".*".join(parts), masked(actual), re.DOTALL) is not None
