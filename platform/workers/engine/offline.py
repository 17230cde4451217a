"""An engine for whoever wants whole sequences: no stream, no router, no adapters. They come back as they end."""

import math
import queue
import time
from collections.abc import Callable
from types import TracebackType

from penstock.prefix.hashing import ChainHasher
from penstock.wire.errors import EngineFault
from penstock.wire.frames import SamplingParams
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, EngineLoad, StepReport
from penstock.workers.engine.runner import Runner
from penstock.workers.engine.sequence import SeqOutput, Sequence

POLL_S = 5.0
"""Time after which it is looked at whether the engine still lives."""


class OfflineEngine:
    """Runs while its context lasts."""

    def __init__(
        self, runner: Runner, config: EngineConfig, on_output: Callable[[SeqOutput], None] | None = None
    ) -> None:
        """Make an engine. on_output: called in the engine's thread with what a step adds to a sequence, for its last
        step before the sequence comes out of `wait`."""
        self._hasher = ChainHasher(bytes(32), config.block_size)
        self._root = self._hasher.root("offline")
        self._ended: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._on_output = on_output
        self._engine = Engine(runner, config, self._hasher, self._take)
        self._awake_since = -math.inf
        self.load: EngineLoad | None = None
        """The engine's load as of its last report; None before the first."""

    def __enter__(self) -> "OfflineEngine":
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Begin a sequence, which later comes out of `wait`. prompt: token ids, 1 at least."""
        keys = self._hasher.extend(self._root, prompt)
        seq = Sequence(
            name, list(prompt), sampling, len(prompt), keys, keys[-1] if keys else self._root, time.monotonic()
        )
        self._engine.submit(seq)
        return seq

    def wait(self, timeout_s: float | None = None) -> Sequence:
        """Wait for the next sequence that ends. Raises EngineFault if the engine has ended, TimeoutError."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            left = POLL_S if until is None else min(POLL_S, until - now)
            try:
                return self._ended.get(timeout=max(0.0, left))
            except queue.Empty:
                before, now = now, time.monotonic()
                if now - before > max(0.0, left) + POLL_S:
                    self._awake_since = now  # the process was stopped, and the step with it
                if not self._engine.can_compute or self._engine.has_stalled(now, self._awake_since):
                    raise EngineFault("The model's engine has ended; its log says why.") from None
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError("no sequence has ended in time") from None

    def _take(self, report: StepReport) -> None:
        self.load = report.load
        for output in report.outputs:
            if self._on_output is not None:
                self._on_output(output)
            if output.finish is not None:
                self._ended.put(output.seq)
