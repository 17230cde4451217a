"""The marks by which `bench.support.faults` knows the sequences beside which a replica is to fail, and the environment
that a platform with such replicas is started in."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "faults"


@dataclass(frozen=True)
class Marks:
    """What marks a sequence; empty, or -1: nothing does."""

    prompt: list[int] = field(default_factory=list)
    """Token ids at the beginning of a prompt; a step with it raises before it is computed."""
    bias: int = -1
    """Token id in the logit bias; a step with it raises when it has been computed."""
    adapter: str = ""
    """Digest of an adapter; a step with it raises when it has been computed."""
    fatal_prompt: list[int] = field(default_factory=list)
    """Token ids at the beginning of a prompt that kills the process."""


@contextmanager
def faulty_replicas(marks: Marks) -> Iterator[None]:
    """Let platforms that are started meanwhile fail beside marked sequences."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PENSTOCK_BENCH_FAULTS")}
    path = [str(FOLDER), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PENSTOCK_BENCH_FAULTS": json.dumps(asdict(marks))}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
