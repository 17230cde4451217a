"""Faults of replicas, on purpose: steps that raise, and processes that die, beside sequences that bear a mark.

Python imports a `sitecustomize` that it finds on PYTHONPATH whenever it starts, so a platform that was started with
this folder there has it in every process. It wraps the torch runner once that is imported, where PENSTOCK_BENCH_FAULTS
says what the marks are (`bench.support.marks`), and does nothing else.
"""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RUNNER = "penstock.workers.compute.runner"


class _Marks:
    """What marks a sequence. An empty mark marks none."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._fatal: list[int] = said["fatal_prompt"]
        self._prompt: list[int] = said["prompt"]
        self._bias: int = said["bias"]
        self._adapter: str = said["adapter"]

    def is_fatal(self, seq: Any) -> bool:
        """Whether the process dies of the sequence."""
        return self._begins(seq, self._fatal)

    def fails_before(self, seq: Any) -> bool:
        """Whether a step with the sequence raises before anything is computed."""
        return self._begins(seq, self._prompt)

    def fails_after(self, seq: Any) -> bool:
        """Whether a step with the sequence raises when all of it has been computed and chosen."""
        has_bias = any(token_id == self._bias for token_id, _ in seq.sampling.logit_bias)
        return has_bias or (bool(self._adapter) and seq.adapter == self._adapter)

    def _begins(self, seq: Any, mark: Sequence[int]) -> bool:
        return bool(mark) and seq.token_ids[: len(mark)] == mark


def _wrap(runner: Any, marks: _Marks) -> None:
    launch = runner.launch

    def faulty(self: Any, step: Any) -> Callable[[], Any]:
        seqs = [chunk.seq for chunk in step.chunks]
        if any(map(marks.is_fatal, seqs)):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(map(marks.fails_before, seqs)):
            raise FloatingPointError("a sequence that bears the mark of a fault")
        wait = launch(self, step)

        def choose() -> Any:
            sampled = wait()
            if any(map(marks.fails_after, seqs)):
                raise FloatingPointError("a sequence that bears the mark of a fault")
            return sampled

        return choose

    runner.launch = faulty


class _Finder(MetaPathFinder):
    """Finds the runner's module once, and wraps the runner when that has been executed."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module.TorchRunner, self._marks)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PENSTOCK_BENCH_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder(_Marks(json.loads(os.environ["PENSTOCK_BENCH_FAULTS"]))))
