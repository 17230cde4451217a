"""The environment in which processes that are started run with faults: `bench.support.faults` has a module that Python
finds there by itself."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "faults"
ROOT = FOLDER.parents[2]


@contextmanager
def started_with_faults(variables: Mapping[str, str]) -> Iterator[None]:
    """Let what is started meanwhile find these variables, and the module that acts on them."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", *variables)}
    path = [str(FOLDER), str(ROOT), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), **variables}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
