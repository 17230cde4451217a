"""Counts what Triton compiles, or loads for the first time in this process, while it is open: after readiness there
should be nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.workers.compute.triton.compilations import Compilations


@contextmanager
def counted() -> Iterator[Compilations]:
    """One at a time. In the interpreter nothing is compiled, and nothing counted."""
    compilations = Compilations()
    compilations.begin()
    try:
        yield compilations
    finally:
        compilations.end()
