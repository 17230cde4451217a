"""Ranks as threads of one process: a process group without processes, for tests of what ranks compute."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Done:
    """An operation that has ended."""

    def wait(self) -> bool:
        return True


class ThreadBackend:
    """The end of one thread; see `torch.distributed.Backend`. Sums give nothing to wait for, as NCCL's, the others do,
    as gloo's."""

    def __init__(self, barrier: threading.Barrier, given: list[Tensor | None], rank: int) -> None:
        self._barrier = barrier
        self._given = given
        self._rank = rank

    def allreduce(self, tensors: list[Tensor], _options: object) -> None:
        total = torch.stack(self._exchange(tensors[0])).sum(dim=0)
        tensors[0].copy_(total)

    def _allgather_base(self, out: Tensor, own: Tensor, _options: object) -> Done:
        torch.cat(self._exchange(own), out=out)
        return Done()

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor. Fails, and does not hang, where a rank does not come."""
        self._given[self._rank] = own.clone()
        self._barrier.wait(timeout=30)
        found = [tensor for tensor in self._given if tensor is not None]
        self._barrier.wait(timeout=30)
        assert len({tensor.shape for tensor in found}) == 1
        return found


def thread_backends(size: int) -> list[ThreadBackend]:
    barrier, given = threading.Barrier(size), [None] * size
    return [ThreadBackend(barrier, given, rank) for rank in range(size)]  # type: ignore[arg-type]


def on_all(size: int, function: Callable[[int], Result]) -> list[Result]:
    """What the function returns for each rank, all in threads of their own at the same time."""

    def run(rank: int) -> Result:
        with torch.inference_mode():
            return function(rank)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
