"""The choice of kernels for matrices, by row counts and times that somebody measured. Pure: times in, choices out.

Kernels that read the same packed bytes are chosen bucket by bucket. torch's int4 operator wants the bytes in another
order, and two copies would double the memory; so a matrix has the one or the other, by the sum over all buckets of what
a step takes, each by its share of steps.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.workers.compute.triton.products.tiling import BUCKETS, SMALL_ROWS, Tile

Kernel = Tile | Literal["dense", "int4"]
"""How a product is computed: by tiles of the packed matrix, dequantized before, or by torch's int4 operator."""
MANY_ROWS = 2048
"""Rows for which the bucket beyond the last is measured."""
ROW_COUNTS = (*BUCKETS, MANY_ROWS)
SHARES = {16: 0.3, 32: 0.2, 64: 0.15, 128: 0.1, 256: 0.1, 512: 0.05, 1024: 0.05, MANY_ROWS: 0.05}
"""Share of steps with the rows of each bucket, about: most are decode steps, few have pieces of prompts."""
MARGIN = 0.03
"""Share of the time by which a kernel must be quicker than the table's to be chosen: less is noise, and the same choice
at every start is worth more."""

Times = Mapping[Kernel, float]
"""Seconds of each kernel that could be measured, the table's own first."""


class Choice(NamedTuple):
    """What multiplies a matrix."""

    is_int4: bool
    """Whether torch's int4 operator does, for all rows; `kernels` is then empty."""
    kernels: Mapping[int, Kernel]
    """Kernel of each bucket; MANY_ROWS for those beyond."""


def candidates(rows: int, tiles: Sequence[Tile], *, has_int4: bool) -> tuple[Kernel, ...]:
    """Kernels that can multiply with the rows of a bucket, the one that is taken unmeasured first. tiles: those of the
    bucket; none of rows beyond the last."""
    own: tuple[Kernel, ...] = tuple(tiles) if rows <= SMALL_ROWS else (*tiles, "dense")
    return (*own, "int4") if has_int4 else own


def choose(times: Mapping[int, Times]) -> Choice:
    """The choice by what was measured, seconds by rows and kernel. Rows of which nothing is known are left to the
    tables."""
    own = {rows: _without_int4(found) for rows, found in times.items()}
    kernels = {rows: _quickest(found) for rows, found in own.items() if found}
    if kernels.keys() != set(ROW_COUNTS) or any("int4" not in found for found in times.values()):
        return Choice(is_int4=False, kernels=kernels)
    by_groups = sum(SHARES[rows] * own[rows][kernel] for rows, kernel in kernels.items())
    by_int4 = sum(SHARES[rows] * times[rows]["int4"] for rows in ROW_COUNTS)
    is_int4 = by_int4 < (1 - MARGIN) * by_groups
    return Choice(is_int4, {} if is_int4 else kernels)


def _without_int4(times: Times) -> dict[Kernel, float]:
    return {kernel: seconds for kernel, seconds in times.items() if kernel != "int4"}


def _quickest(times: Times) -> Kernel:
    """The kernel with the least seconds, or the first one where that is hardly slower."""
    best, usual = min(times, key=times.__getitem__), next(iter(times))
    return best if times[best] < (1 - MARGIN) * times[usual] else usual


# as they are remembered in a file


def encode(choice: Choice) -> dict[str, object]:
    """The choice as JSON can hold it."""
    kernels = {
        str(rows): kernel if isinstance(kernel, str) else [type(kernel).__name__, *kernel]
        for rows, kernel in choice.kernels.items()
    }
    return {"is_int4": choice.is_int4, "kernels": kernels}


def decode(value: object) -> Choice | None:
    """What `encode` made; None where it is anything else, or names a kernel that is not known any more."""
    match value:
        case {"is_int4": bool(is_int4), "kernels": dict(found)}:
            kernels = {
                rows: kernel for rows in ROW_COUNTS if (kernel := _decode_kernel(found.get(str(rows)))) is not None
            }
            if len(kernels) == len(found):
                return Choice(is_int4, kernels)
    return None


def _decode_kernel(value: object) -> Kernel | None:
    match value:
        case "dense":
            return "dense"
        case ["Tile", int(outputs), int(rows), int(num_warps), int(num_stages), int(programs), int(columns)]:
            return Tile(outputs, rows, num_warps, num_stages, programs, columns)
    return None
