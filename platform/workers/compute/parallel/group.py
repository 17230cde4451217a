"""What ranks exchange while they compute: `models.peers.Peers` over torch's process groups, NCCL between GPUs, gloo
between CPUs.

The ranks are on one machine. They find each other by a file, and gloo's sockets are on loopback, so nothing of this can
be reached from outside. Invariant: every operation is counted, and ranks that stay together have the same count.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, distributed
from torch.nn import functional

from penstock.workers.compute.parallel.shares import Share

LOOPBACK = "127.0.0.1"


class Pending(Protocol):
    """An operation that has begun."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """The operations of torch's process groups (`torch.distributed.Backend`) that ranks use."""

    def allreduce(self, tensors: list[Tensor], /) -> Pending:
        """Sums, in place."""

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Pending:
        """Every rank's tensor into a list of tensors of the same shape."""


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
        self._backend.allreduce([total]).wait()
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

    def _gather(self, x: Tensor) -> list[Tensor]:
        self.num_operations += 1
        parts = [torch.empty_like(x) for _ in self._shares]
        self._backend.allgather([parts], [x]).wait()
        return parts


def connect(meeting: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> Backend:
    """The rank's end of a process group; returns when all ranks have come. meeting: a path in a folder that only these
    processes can write to; the file is made there. timeout_s: how long an operation waits for the other ranks."""
    store = distributed.FileStore(str(meeting), size)  # type: ignore[attr-defined]  # torch exports it unsaid
    store.set_timeout(timedelta(seconds=timeout_s))
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        of_nccl = distributed.ProcessGroupNCCL.Options()
        of_nccl._timeout = timeout
        return cast(Backend, distributed.ProcessGroupNCCL(store, rank, size, of_nccl))
    of_gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the name at run time
    of_gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    of_gloo._timeout = timeout
    return cast(Backend, distributed.ProcessGroupGloo(store, rank, size, of_gloo))
