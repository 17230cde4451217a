"""Refusals of a command: one sentence on standard error, and an exit status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from penstock.base.errors import PenstockError

REFUSED = 2
"""Exit status where nothing was done."""


def complain(error: PenstockError) -> None:
    message = error.message if error.message.endswith((".", "!", "?")) else f"{error.message}."
    print(f"penstock: {message}", file=sys.stderr)


@contextmanager
def refusing() -> Iterator[None]:
    """End the command at a mistake of the user's, without a traceback."""
    try:
        yield
    except PenstockError as error:
        complain(error)
        raise typer.Exit(REFUSED) from error
