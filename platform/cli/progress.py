"""Progress of a start or stop, for a person: one line a step, with a spinner on a terminal and plain lines
elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads it, and not a file; a Console takes FORCE_COLOR for a terminal."""
        return self._console.file.isatty()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show `what` while the body runs, and how long it took when it succeeded."""
        start = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(f"... {what}", highlight=False)
            yield
        self._console.print(f"[green]ok[/green]  {what} ({time.monotonic() - start:.1f} s)", highlight=False)

    def print_line(self, text: str) -> None:
        """Print a line as it is: nothing wrapped, nothing coloured, so that it can be copied."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
