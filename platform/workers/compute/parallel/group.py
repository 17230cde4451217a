"""What ranks exchange while they compute: `models.peers.Peers` over torch's process groups, NCCL between GPUs, gloo
between CPUs.

The ranks are on one machine. They find each other by a file, and gloo's sockets are on loopback, so nothing of this can
be reached from outside. Invariant: every operation is counted, and ranks that stay together have the same count.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.nn import functional

from penstock.workers.compute.parallel.shares import Share

Options = TypeVar("Options", AllreduceOptions, AllgatherOptions)
LOOPBACK = "127.0.0.1"
COMPILE_S = 300.0
"""Time that ranks may be apart on GPUs, where one still compiles a kernel that another has, seconds. Whether a step
stalls is for the engine's health to say (`engine.stall_s`)."""


def _on_current_stream(options: Options) -> Options:
    """Options of an operation that NCCL launches on the stream that computes, not on one of its own, which would wait
    for that one and be waited for; in a recording each wait would be an edge."""
    options.asyncOp = False
    return options


_SUM = _on_current_stream(AllreduceOptions())
_GATHER = _on_current_stream(AllgatherOptions())


class Pending(Protocol):
    """An operation that has begun."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """The operations of torch's process groups (`torch.distributed.Backend`) that ranks use."""

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Pending | None:
        """Sums, in place."""

    def _allgather_base(self, out: Tensor, own: Tensor, options: AllgatherOptions, /) -> Pending | None:
        """Every rank's tensor one behind the other."""


def _wait(pending: Pending | None) -> None:
    """Wait for an operation; NCCL, on the current stream, has nothing to wait for and returns None."""
    if pending is not None:
        pending.wait()


class Group:
    """One rank's end. One thread at a time; every method waits for all ranks, on a GPU without the host."""

    def __init__(self, backend: Backend, shares: list[Share], rank: int) -> None:
        """backend: as `connect` returns it."""
        self.num_operations = 0
        """Operations that this rank has begun."""
        self._backend = backend
        self._shares = shares
        self._own = shares[rank]

    @property
    def token_ids(self) -> range:
        return self._own.token_ids

    def add(self, x: Tensor) -> Tensor:
        self.num_operations += 1
        # gloo adds in the tensor's type, and few CPUs have instructions for sums in bfloat16
        total = x if x.is_cuda else x.float()
        _wait(self._backend.allreduce([total], _SUM))
        return total.to(x.dtype)

    def join(self, logits: Tensor) -> Tensor:
        if not len(logits):
            return logits.new_empty(0, self._shares[-1].token_ids.stop)
        most = max(len(share.token_ids) for share in self._shares)
        padded = functional.pad(logits, (0, most - logits.shape[1])).contiguous()
        parts = self._gather(padded)
        return torch.cat(
            [part[:, : len(share.token_ids)] for part, share in zip(parts, self._shares, strict=True)], dim=1
        )

    def merge(self, best: Tensor) -> Tensor:
        if not best.shape[1]:
            return best
        best[0] += self._own.token_ids.start
        ids, values = torch.stack(self._gather(best)).unbind(1)
        found, rank = values.max(dim=0)  # of equals the first rank, whose ids are lowest; NaN before all numbers
        return torch.stack((ids.gather(0, rank[None])[0], found))

    def least(self, value: int, device: torch.device) -> int:
        """The least of all ranks' values."""
        return min(int(part) for part in self._gather(torch.tensor([value], dtype=torch.int64, device=device)))

    def _gather(self, x: Tensor) -> tuple[Tensor, ...]:
        self.num_operations += 1
        size = len(self._shares)
        parts = x.new_empty(size * len(x), *x.shape[1:])
        _wait(self._backend._allgather_base(parts, x, _GATHER))
        return parts.chunk(size)


def connect(meeting: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> Backend:
    """The rank's end of a process group; returns when all ranks have come. meeting: a path in a folder that only these
    processes can write to; the file is made there. timeout_s: how long an operation waits for the other ranks; on a GPU
    COMPILE_S at least."""
    timeout = timedelta(seconds=max(timeout_s, COMPILE_S) if device.type == "cuda" else timeout_s)
    store = distributed.FileStore(str(meeting), size)  # type: ignore[attr-defined]  # torch exports it unsaid
    store.set_timeout(timeout)
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        of_nccl = distributed.ProcessGroupNCCL.Options()
        of_nccl._timeout = timeout
        return cast(Backend, distributed.ProcessGroupNCCL(store, rank, size, of_nccl))
    of_gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the name at run time
    of_gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    of_gloo._timeout = timeout
    return cast(Backend, distributed.ProcessGroupGloo(store, rank, size, of_gloo))
