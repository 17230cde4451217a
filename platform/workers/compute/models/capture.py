"""Recording what is launched on a GPU, so that a call launches all of it at once (CUDA graphs).

Invariant of whatever is recorded: it waits for nothing, reads nothing on the host, launches the same whatever a step
brings, and reads and writes only memory that outlives it at the same place, but for what it makes and drops itself.
That lies in a pool that all recordings share: none may keep a tensor of it, since another one writes over it.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

Compute = Callable[[], None]


class Recorder(Protocol):
    def record(self, compute: Compute) -> Compute:
        """What does what `compute` did when it was recorded."""


class NoRecorder:
    """Calls instead: where there is nothing to record with, so that all but the recording itself is tested."""

    def record(self, compute: Compute) -> Compute:
        return compute


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recorders: libraries keep memory for each stream for good."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphRecorder:
    """Records on a stream beside the caller's, into one pool. The largest comes first: the others find room in its
    memory."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """Computes twice, behind what the caller's stream was given before, and before what it is given next: first
        without recording, so that kernels are compiled and libraries have their memory."""
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            compute()
            # not torch.cuda.graph, which empties caches and waits for the GPU before each of hundreds of graphs
            # other threads, as NCCL's, may ask for their events meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                compute()
            finally:
                graph.capture_end()
        caller.wait_stream(self._stream)
        self.num_graphs += 1
        return graph.replay

    @contextmanager
    def session(self) -> Iterator[None]:
        """A context for all recording: nothing of before is under way or is freed meanwhile, and what the first
        computations took is given back."""
        gc.collect()
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
            torch.cuda.synchronize(self._stream.device)
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.empty_cache()
