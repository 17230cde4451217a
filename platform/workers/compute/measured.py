"""Choosing kernels for quantized matrices on a GPU by timing them once: what is timed, on what, and the file in the
user's cache folder that remembers it.

Of each shape the model's own matrices are timed one after another, more bytes than the GPU's cache holds, in a CUDA
graph: neither launching nor the cache is measured. What is chosen depends on the GPU's model, the versions of torch and
Triton and the shape, which is what the file knows it by. The choice itself is `triton.products.kernel_choice`'s, and
pure.
"""

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.workers.compute.kernels.build import cache_folder
from penstock.workers.compute.triton.products.grouped import read_back
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix, capability_of
from penstock.workers.compute.triton.products.int4_matrix import OperatorMatrix, is_operable
from penstock.workers.compute.triton.products.kernel_choice import (
    ROW_COUNTS,
    Choice,
    Kernel,
    candidates,
    choose,
    decode,
    encode,
)
from penstock.workers.compute.triton.products.tiling import BUCKETS

VERSION = 2
"""Number of the kernels and their tables: another one, and what was measured counts no more."""
ROTATED_BYTES = 96 << 20
"""Bytes of all matrices that are timed together, about: more than a GPU's cache."""
MOST_MATRICES = 16
REPEATS = 5
BUDGET_S = 10.0
"""Seconds of timing after which nothing more is measured: the rest is left to the tables, and to the next start."""
COMPILING_S = 60.0
"""Seconds from the first kernel on after which nothing more is measured, compiling included. What was compiled is kept
on the disk, so the next start comes further."""
TOLERANCE = 0.03
"""Largest difference from the table's kernel, as a share of the largest number, with which another is believed."""

T = TypeVar("T")
Calls = Sequence[Callable[[], object]]
Timer = Callable[[Calls], float]
"""Seconds that the calls take together, one after another."""

_log = logging.getLogger("penstock.kernels")


class Kind(NamedTuple):
    """What decides which kernel is quickest, beside the GPU."""

    outputs: int
    columns: int
    bits: int
    group_size: int
    second_kind: str
    scale: str
    """Type of the scales."""
    dtype: str
    """Type of the activations."""
    can_be_int4: bool
    """Whether torch's operator may take it: tables, of which rows are looked up, may not."""

    @property
    def name(self) -> str:
        """Name in the file."""
        return " ".join(map(str, self))


class Timing(NamedTuple):
    """How kernels are timed."""

    timer: Timer
    now: Callable[[], float]
    """A clock, in seconds."""
    file: Path
    """What was measured before, and will be remembered."""
    where: str
    """The GPU and the versions."""


class Budget:
    """The time that measuring may take."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._left_s = BUDGET_S
        self._end_s = now() + COMPILING_S

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0 or self._now() > self._end_s

    def charge(self, run: Callable[[], float]) -> float:
        """The result of `run`, whose time counts as timing."""
        begun_s = self._now()
        found = run()
        self._left_s -= self._now() - begun_s
        return found


def gpu_timing(device: torch.device) -> Timing:
    """How kernels are timed on a GPU."""
    from triton import __version__ as triton_version  # noqa: PLC0415 (Triton may be absent)

    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton_version}, {VERSION}"
    return Timing(graph_seconds, time.monotonic, cache_folder().parent / "gpu" / "choices.json", name)


def use_quickest(
    weights: Mapping[str, object], tables: Collection[str], timing: Timing
) -> Iterator[tuple[str, OperatorMatrix]]:
    """Chooses kernels for all grouped matrices of a model, and gives those anew, by name, that torch's operator is to
    multiply. tables: names of matrices of which rows are looked up."""
    by_kind: dict[Kind, list[tuple[str, GroupedMatrix]]] = {}
    for name, weight in weights.items():
        if isinstance(weight, GroupedMatrix):
            by_kind.setdefault(kind_of(weight, is_table=name in tables), []).append((name, weight))
    known = read_choices(timing)
    budget = Budget(timing.now)
    fresh = {}
    for kind, named in sorted(by_kind.items(), key=lambda item: -sum(matrix.nbytes for _, matrix in item[1])):
        choice = known.get(kind.name)
        if choice is None:
            times = measure(kind, [matrix for _, matrix in named], timing, budget)
            choice = choose(times)
            if times.keys() == set(ROW_COUNTS):
                fresh[kind.name] = choice
        _log.info("Matrices [%d, %d] of %d bits: %s.", kind.outputs, kind.columns, kind.bits, describe(choice))
        while named:  # one after the other goes, as it is replaced
            name, matrix = named.pop()
            if choice.is_int4:
                yield name, OperatorMatrix(read_back(matrix.tensor))
            else:
                matrix.use(choice.kernels)
    if fresh:
        remember(timing, known | fresh)


def kind_of(matrix: GroupedMatrix, *, is_table: bool) -> Kind:
    tensor = matrix.tensor
    outputs, columns = tensor.shape
    operable = is_operable(tensor.shape, tensor.bits, tensor.group_size, tensor.dtype, capability_of(matrix.device))
    return Kind(
        outputs,
        columns,
        tensor.bits,
        tensor.group_size,
        tensor.second_kind,
        str(tensor.scale.dtype),
        str(tensor.dtype),
        operable and not is_table,
    )


def describe(choice: Choice) -> str:
    if choice.is_int4:
        return "torch's int4 operator"
    return ", ".join(f"{rows} rows by {kernel}" for rows, kernel in choice.kernels.items()) or "not measured"


def measure(
    kind: Kind, matrices: Sequence[GroupedMatrix], timing: Timing, budget: Budget
) -> dict[int, dict[Kernel, float]]:
    """Seconds by rows and kernel, of matrices of one kind together; kernels that fail or compute something else are
    left out, and all rows that time does not suffice for."""
    first = matrices[0]
    count = min(len(matrices), MOST_MATRICES, max(1, -(-ROTATED_BYTES // first.nbytes)))
    int4 = [OperatorMatrix(read_back(matrix.tensor)) for matrix in matrices[:count]] if kind.can_be_int4 else []
    found: dict[int, dict[Kernel, float]] = {}
    for rows in ROW_COUNTS:
        x = torch.randn(rows, kind.columns, device=first.device).to(first.dtype)
        expected: Tensor | None = None
        times: dict[Kernel, float] = {}
        for kernel in candidates(rows, first.tiles(rows) if rows in BUCKETS else (), has_int4=bool(int4)):
            if budget.is_spent:
                return found
            calls = (
                [partial(matrix.multiply, x) for matrix in int4]
                if kernel == "int4"
                else [partial(matrix.multiply_by, kernel, x) for matrix in matrices[:count]]
            )
            result = _try(calls[0], kernel, rows)
            if expected is None:
                expected = result
            if result is not None and expected is not None and _is_close(result, expected, kernel):
                seconds = _try(partial(budget.charge, partial(timing.timer, calls)), kernel, rows)
                if seconds is not None:
                    times[kernel] = seconds
        found[rows] = times
    return found


def _try(call: Callable[[], T], kernel: Kernel, rows: int) -> T | None:
    """The result; None, with a line in the log, where the kernel does not run here."""
    from triton.errors import TritonError  # noqa: PLC0415 (Triton may be absent)

    try:
        return call()
    except (RuntimeError, TritonError) as error:
        _log.warning("%s does not run here for %d rows, and is not used: %s", kernel, rows, error)
        return None


def _is_close(result: Tensor, expected: Tensor, kernel: Kernel) -> bool:
    difference = float((result.float() - expected.float()).abs().max() / expected.float().abs().max())
    if difference <= TOLERANCE:
        return True
    _log.warning("%s computes something else here, by %.3f of the largest number, and is not used.", kernel, difference)
    return False


def graph_seconds(calls: Calls) -> float:
    """Seconds of the calls on a GPU, in a CUDA graph, the median of some runs."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPEATS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


# the file


def read_choices(timing: Timing) -> dict[str, Choice]:
    """What was chosen on such a GPU before, by the kind's name; nothing where the file is absent or broken."""
    try:
        whole = json.loads(timing.file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = whole.get(timing.where) if isinstance(whole, dict) else None
    if not isinstance(found, dict):
        return {}
    choices = {name: decode(value) for name, value in found.items()}
    return {name: choice for name, choice in choices.items() if choice is not None}


def remember(timing: Timing, choices: Mapping[str, Choice]) -> None:
    """Writes the choices of such a GPU beside others of it, which another rank may have written meanwhile, and those of
    other GPUs. A folder that nobody can write to is no matter."""
    try:
        whole = json.loads(timing.file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        whole = {}
    whole = whole if isinstance(whole, dict) else {}
    before = whole.get(timing.where)
    own = {name: encode(choice) for name, choice in choices.items()}
    whole[timing.where] = (before if isinstance(before, dict) else {}) | own
    try:
        timing.file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=timing.file.parent, delete=False, encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
        Path(file.name).replace(timing.file)
    except OSError as error:
        _log.info("What was measured is not remembered: %s.", error)
