"""Bringing tensors to a device beside what it computes: while an engine's steps are under way, hundreds of small copies
in their stream would each wait for all steps that are launched already."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.workers.compute.triton.staging import lay_out

CHUNK_BYTES = 8 << 20
"""Bytes of pinned memory through which they go."""


def place_aside(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous copies, in one piece of the device's memory, of tensors that are on the host. Waits for the copies,
    which run in a stream of their own, and once for the steps that are launched when it begins: they may still use the
    memory. From any thread."""
    packed = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    starts, total = lay_out(part.nbytes for part in packed)
    target = torch.empty(total, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        _copy_aside(_joined(packed, starts, total), target)
    else:
        target.copy_(_joined(packed, starts, total))
    return [
        target[start : start + part.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, part, start in zip(tensors, packed, starts, strict=True)
    ]


def _joined(parts: Sequence[Tensor], starts: Sequence[int], total: int) -> Tensor:
    joined = torch.empty(total, dtype=torch.uint8)
    for part, start in zip(parts, starts, strict=True):
        joined[start : start + part.nbytes] = part
    return joined


def _copy_aside(source: Tensor, target: Tensor) -> None:
    stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
    stream.wait_event(torch.cuda.current_stream(target.device).record_event())
    pinned = torch.empty(min(len(source), CHUNK_BYTES), dtype=torch.uint8, pin_memory=True)
    for start in range(0, len(source), CHUNK_BYTES):
        part = source[start : start + CHUNK_BYTES]
        pinned[: len(part)].copy_(part)
        with torch.cuda.stream(stream):
            target[start : start + len(part)].copy_(pinned[: len(part)], non_blocking=True)
        stream.synchronize()
