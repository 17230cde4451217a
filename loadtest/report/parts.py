"""Parts of a page as plain values: what the templates are given. No markup is made here; jinja escapes every text."""

from collections.abc import Sequence
from typing import NamedTuple


class Banner(NamedTuple):
    """A warning above the figures."""

    title: str
    text: str


class Card(NamedTuple):
    """A headline figure."""

    label: str
    value: str
    note: str
    is_bad: bool = False
    second: str = ""  # figure, below the first


class PageHeader(NamedTuple):
    """The head of a page, of any kind: title, headings, banners and headline figures."""

    title: str  # of the browser's tab
    kicker: str  # the small line above the heading
    heading: str
    line: str  # the sentence below the heading
    banners: Sequence[Banner]
    cards: Sequence[Card]


class Column(NamedTuple):
    """The head of a table's column and how its cells are set."""

    title: str
    is_text: bool = False  # left, not right
    note: str = ""  # what the title means, where it needs it


class Rows(NamedTuple):
    """Rows of a table under a heading of their own; an empty title has none."""

    title: str
    rows: Sequence[Sequence[str]]


class Table(NamedTuple):
    """A table whose first cell in each row is the row's heading."""

    caption: str
    columns: Sequence[Column]
    parts: Sequence[Rows]
    note: str = ""  # below it

    def pair_cells(self, row: Sequence[str]) -> list[tuple[Column, str]]:
        """Each cell of `row` with its column; raises ValueError where the row is longer or shorter than the table."""
        return list(zip(self.columns, row, strict=True))
