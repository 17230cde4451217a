"""Faults of replicas and of the autoscaler, on purpose.

Python imports a `sitecustomize` that it finds on PYTHONPATH whenever it starts, so a platform that was started with
this folder there has it in every process. Where PENSTOCK_BENCH_FAULTS says what the marks are (`bench.support.marks`),
it wraps the torch runner once that is imported: steps raise, and processes die, beside sequences that bear a mark.
Where PENSTOCK_BENCH_SCALING_FAULTS names a file, it lets `bench.support.scaling_faults` wrap the autoscaler. It does
nothing else.
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
AUTOSCALER = "penstock.autoscale.loop"


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


def _wrap_autoscaler(module: ModuleType) -> None:
    from bench.support.scaling_faults import wrap  # noqa: PLC0415 (half a second that only the autoscaler has)

    wrap(module)


class _Finder(MetaPathFinder):
    """Finds one module, and wraps what is in it when it has been executed."""

    def __init__(self, name: str, wrap: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._wrap = wrap

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "PENSTOCK_BENCH_FAULTS" in os.environ:
    marks = _Marks(json.loads(os.environ["PENSTOCK_BENCH_FAULTS"]))
    sys.meta_path.insert(0, _Finder(RUNNER, lambda module: _wrap(module.TorchRunner, marks)))
if "PENSTOCK_BENCH_SCALING_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder(AUTOSCALER, _wrap_autoscaler))
