"""The marks by which `bench.support.faults` knows the sequences beside which a replica is to fail, and the environment
that a platform with such replicas is started in."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from bench.support.faulty_start import started_with_faults


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
    with started_with_faults({"PENSTOCK_BENCH_FAULTS": json.dumps(asdict(marks))}):
        yield
