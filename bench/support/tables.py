"""Tables of a bench that compares many: on standard output and on a page."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as PrintedTable

from penstock_loadtest.report.parts import Column, Rows, Table


def print_cells(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first cells are text."""
    table = PrintedTable(title=caption)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False).print(table)


def make_page_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The same table as a part of a page."""
    return Table(caption, [Column(head, is_text=not place) for place, head in enumerate(heads)], [Rows("", rows)])
