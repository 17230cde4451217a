"""LoRA (Hu et al. 2021) beside the base model's matrices: y = x W^T + scaling * x A^T B^T, each row of a step with its
own A and B, or none. With DoRA (Liu et al. 2024) that product, biases aside, is multiplied with
m / ||W + scaling B A||, by rows of the matrix; these factors are computed when the adapter is loaded, of the very
weights that are served.

Adapters of different tenants and the base share a step: its rows are grouped by adapter, and each group is added to the
rows of the base product. Modules that the model has fused share one product with their As side by side. A step without
adapters pays one comparison a matrix. In exact mode both small products go by the same fixed tiles as the large ones
(`linear`), so a row's bits do not depend on its company. On a GPU each of the two products is one launch for all
adapters of a step (`penstock.workers.compute.triton.low_rank`). Fused steps on the CPU add the same in their own call
(`kernels.low_rank`).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.adapters.peft import WEIGHTS_FILE, Adapted, BaseShapes, Checked, check_folder
from penstock.adapters.store import digest_of
from penstock.wire.errors import InvalidRequest
from penstock.workers.compute.device import CPU
from penstock.workers.compute.kernels.low_rank import Module, PackedAdapter, packed_bytes
from penstock.workers.compute.linear import dense_rows, linear
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.placing import place_aside
from penstock.workers.compute.quant.packed import Packed
from penstock.workers.compute.quant.quantized import Matrix
from penstock.workers.compute.triton.products.matrices import GpuMatrix
from penstock.workers.compute.triton.segments import (
    AdapterMatrices,
    AdapterTables,
    Segments,
    make_segments,
    table_of,
)
from penstock.workers.engine.sequence import Chunk

NO_DORA = (
    "DoRA (use_dora) is served on CPUs, by models that are not in parts; train it as plain LoRA for this one, or merge"
    " it into the base model."
)
_ALONE = threading.Lock()
CHUNK_ELEMENTS = 1 << 20
"""Elements of a base matrix that are dequantized at once to learn the length of its rows."""

FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The model's matrices, and the modules stacked in each, in order."""


class Part(NamedTuple):
    """One module in a fused matrix: output columns [start, end)."""

    start: int
    end: int
    b: Tensor
    """[end - start, rank], with the scaling in it, and the factors of DoRA."""
    factor: Tensor | None = None
    """float32 [end - start], of the base product (DoRA); None: one."""
    bias: Tensor | None = None
    """[end - start], the base's, which is not multiplied. Only where there are factors."""


BaseWeights = Mapping[str, Matrix | Packed | GpuMatrix]
"""Weights of a base model as it is served, by the names of `weights.load_weights`."""


class LowRank:
    """What an adapter adds to one fused matrix."""

    def __init__(self, a: Tensor, parts: Sequence[Part]) -> None:
        """a: [rank of all parts, K], in their order."""
        self.a = a
        self.parts = parts

    @property
    def tensors(self) -> list[Tensor]:
        """A and the Bs."""
        return [self.a, *(part.b for part in self.parts)]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is the adapter's own."""
        factors = [part.factor for part in self.parts if part.factor is not None]
        return sum(tensor.nbytes for tensor in (*self.tensors, *factors))

    @property
    def modules(self) -> list[Module]:
        """Each module by itself."""
        of_each = torch.split(self.a, [part.b.shape[1] for part in self.parts])
        return [
            Module(part.start, part.end, a, part.b, part.factor) for a, part in zip(of_each, self.parts, strict=True)
        ]

    def add_to(self, out: Tensor, x: Tensor, rows: Tensor | None, exact: bool) -> None:
        """Add the adapter's part for x [T, K] to out [T, N], at `rows` (int64); None stands for all rows."""
        inner = linear(x if rows is None else x[rows], self.a, None, exact)
        begin = 0
        for part in self.parts:
            rank = part.b.shape[1]
            added = linear(inner[:, begin : begin + rank], part.b, None, exact)
            own = out[:, part.start : part.end]
            if part.factor is not None:
                base = own if rows is None else own[rows]
                base = base if part.bias is None else base - part.bias
                added = (added + base * (part.factor - 1)).to(out.dtype)
            if rows is None:
                own += added
            else:
                own.index_add_(0, rows, added)
            begin += rank


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """An adapter that is loaded, on the model's device."""

    digest: str
    layers: Sequence[Mapping[str, LowRank]]
    """What the adapter adds to each layer's matrices, by the names of FUSED; a name is missing where that is nothing.
    No layer where it is packed."""
    num_bytes: int
    table: Tensor
    """Table of the matrices for a GPU's kernels; see `penstock.workers.compute.triton.segments`."""
    max_rank: int
    """Rank of all modules of a matrix together, at most."""
    packed: PackedAdapter | None = None
    """All of it in the form of the CPU's kernels, where these are what computes."""


class AdapterRows(NamedTuple):
    """The rows of a step that belong to one adapter; None: all of them."""

    adapter: LoraAdapter
    rows: Tensor | None


StepAdapters = Sequence[AdapterRows] | Segments
"""The adapters of a step, on the CPU and for a GPU, where their rows are on the host until the step is sent."""


def group_rows_by_adapter(chunks: Sequence[Chunk]) -> list[AdapterRows]:
    """The adapters of a step, whose chunks lie one behind the other with their drafts."""
    if all(chunk.seq.lora is None for chunk in chunks):
        return []
    spans: dict[int, tuple[LoraAdapter, list[Tensor]]] = {}
    start = num_adapted = 0
    for chunk in chunks:
        end = start + chunk.num_tokens + len(chunk.draft or ())
        adapter = chunk.seq.lora
        if adapter is not None:
            assert isinstance(adapter, LoraAdapter)
            spans.setdefault(id(adapter), (adapter, []))[1].append(torch.arange(start, end))
            num_adapted += end - start
        start = end
    is_alone = len(spans) == 1 and num_adapted == start
    return [AdapterRows(adapter, None if is_alone else torch.cat(rows)) for adapter, rows in spans.values()]


def build_segments(
    adapter_rows: Sequence[AdapterRows],
    num_tokens: int,
    tables: AdapterTables | None = None,
    tile: int | None = None,
) -> Segments:
    """The adapters of a step of so many tokens, of which there is one at least, for a GPU's kernels. tables, tile: as
    of `segments.make_segments`."""
    adapters, rows = [rows.adapter for rows in adapter_rows], [rows.rows for rows in adapter_rows]
    return make_segments(adapters, rows, num_tokens, tables, tile)


def make_tables(num_slots: int, max_rank: int, num_layers: int, device: torch.device) -> AdapterTables:
    """Room on a GPU for the tables of so many adapters. max_rank: of a module."""
    return AdapterTables(num_slots, max_rank, num_layers, len(FUSED), device)


def add_adapters(adapter_rows: StepAdapters, layer: int, exact: bool, name: str, out: Tensor, x: Tensor) -> None:
    """Add to `out` what the adapters of a step add to the matrix `name` of FUSED, given its input x."""
    if isinstance(adapter_rows, Segments):
        from penstock.workers.compute.triton.low_rank import add_low_rank  # noqa: PLC0415 (Triton may be absent)

        add_low_rank(out, x, adapter_rows, layer, list(FUSED).index(name))
        return
    for adapter, rows in adapter_rows:
        low_rank = adapter.layers[layer].get(name)
        if low_rank is not None:
            low_rank.add_to(out, x, rows, exact)


def load_lora(
    digest: str,
    folder: Path,
    config: ModelConfig,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    packed_bits: int | None = None,
    base: BaseWeights | None = None,
) -> LoraAdapter:
    """Read an adapter in PEFT's format for a model of `config` on `device`. packed_bits: of an element in the form
    of the CPU's kernels; None: tensors. base: the model; None: DoRA can't be served. Raises InvalidRequest for one that
    does not fit, or is not of that digest."""
    shapes = BaseShapes(config.num_layers, config.linear_shapes)
    checked = check_folder(folder, shapes, max_rank)
    if digest_of(folder) != digest:
        raise InvalidRequest("its files are not those of its digest.")
    if checked.has_magnitudes and base is None:
        raise InvalidRequest(NO_DORA)
    if packed_bits is not None:
        with _on_one_thread():
            return pack_adapter(digest, _read(checked, folder, shapes, dtype, base), packed_bits)
    layers = _read(checked, folder, shapes, dtype, base)
    num_bytes = sum(low_rank.num_bytes for layer in layers for low_rank in layer.values())
    return make_adapter(digest, layers, num_bytes, device)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Keep torch's other threads out, which an engine at work keeps from their cores: a matrix would wait for them
    longer than it takes. One caller at a time, for a new thread takes the number from the process."""
    with _ALONE:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def pack_adapter(digest: str, layers: Sequence[Mapping[str, LowRank]], bits: int = 16) -> LoraAdapter:
    """An adapter of matrices for the CPU's kernels, in so many bits."""
    packed = PackedAdapter(
        [[low_rank.modules if (low_rank := layer.get(name)) else [] for name in FUSED] for layer in layers], bits
    )
    return LoraAdapter(digest, [], packed.nbytes, table_of([], CPU), packed.widest_rank, packed)


def bytes_of_rank(config: ModelConfig, rank: int, dtype: torch.dtype, packed_bits: int | None) -> int:
    """Bytes of an adapter of that rank for every linear layer, with factors of DoRA."""
    of_layer = (
        packed_bytes(rank, outputs, inputs, packed_bits, has_factor=True)
        if packed_bits is not None
        else rank * (outputs + inputs) * dtype.itemsize + outputs * torch.float32.itemsize
        for outputs, inputs in config.linear_shapes.values()
    )
    return config.num_layers * sum(of_layer)


def make_adapter(
    digest: str, layers: Sequence[Mapping[str, LowRank]], num_bytes: int, device: torch.device = CPU
) -> LoraAdapter:
    """An adapter of matrices, one at least, which are on the host or on the device already."""
    if device.type != "cpu" and all(low_rank.a.device.type == "cpu" for layer in layers for low_rank in layer.values()):
        layers = _placed(layers, device)
    table = table_of([[_to_matrices(layer.get(name)) for name in FUSED] for layer in layers], device)
    return LoraAdapter(
        digest, layers, num_bytes, table, max(len(low_rank.a) for layer in layers for low_rank in layer.values())
    )


def _placed(layers: Sequence[Mapping[str, LowRank]], device: torch.device) -> list[dict[str, LowRank]]:
    """The matrices on the device, to which all of them go at once."""
    matrices = [low_rank for layer in layers for low_rank in layer.values()]
    placed = iter(place_aside([tensor for low_rank in matrices for tensor in low_rank.tensors], device))
    return [
        {
            name: LowRank(next(placed), [part._replace(b=next(placed)) for part in low_rank.parts])
            for name, low_rank in layer.items()
        }
        for layer in layers
    ]


def _to_matrices(low_rank: LowRank | None) -> AdapterMatrices | None:
    return None if low_rank is None else AdapterMatrices(low_rank.a, [part[:3] for part in low_rank.parts])


def _read(
    checked: Checked, folder: Path, shapes: BaseShapes, dtype: torch.dtype, base: BaseWeights | None
) -> list[dict[str, LowRank]]:
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            names = [name for adapted in checked.modules.values() for name in adapted.tensors]
            tensors = {name: file.get_tensor(name).float() for name in names}
    except SafetensorError as error:
        raise InvalidRequest(f"its tensors can't be read ({error}).") from error
    reading = _Reading(checked, tensors, shapes, dtype, base)
    return [reading.layer(index) for index in range(shapes.num_layers)]


class _Reading(NamedTuple):
    """An adapter's tensors, float32, on the way to the form in which they are served."""

    checked: Checked
    tensors: Mapping[str, Tensor]
    shapes: BaseShapes
    dtype: torch.dtype
    base: BaseWeights | None

    def layer(self, index: int) -> dict[str, LowRank]:
        found = {name: self._fuse(index, name) for name in FUSED}
        return {name: low_rank for name, low_rank in found.items() if low_rank is not None}

    def _fuse(self, index: int, name: str) -> LowRank | None:
        inner: list[Tensor] = []
        parts: list[Part] = []
        start = 0
        for module in FUSED[name]:
            end = start + self.shapes.modules[module][0]
            adapted = self.checked.modules.get((index, module))
            if adapted is not None:
                inner.append(_finite(adapted.a, self.tensors[adapted.a].to(self.dtype)))
                parts.append(self._part(index, name, range(start, end), adapted))
            start = end
        return LowRank(torch.cat(inner), parts) if parts else None

    def _part(self, index: int, name: str, columns: range, adapted: Adapted) -> Part:
        b = self.tensors[adapted.b] * adapted.scaling
        factor = bias = None
        if adapted.magnitude is not None:
            assert self.base is not None
            lengths = row_lengths(self.base[f"layers.{index}.{name}"], columns, self.tensors[adapted.a], b)
            factor = _finite(adapted.magnitude, self.tensors[adapted.magnitude] / lengths)
            whole = self.base.get(f"layers.{index}.{name}_bias")
            assert whole is None or isinstance(whole, Tensor)
            bias = None if whole is None else whole[columns.start : columns.stop]
            b = b * factor[:, None]
        return Part(columns.start, columns.stop, _finite(adapted.b, b.to(self.dtype)), factor, bias)


def row_lengths(matrix: Matrix | Packed | GpuMatrix, rows: range, a: Tensor, b: Tensor) -> Tensor:
    """float32 [len(rows)]: lengths of rows of a matrix with b [len(rows), rank] times a [rank, K] added to them."""
    step = max(1, CHUNK_ELEMENTS // a.shape[1])
    lengths = []
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        lengths.append(torch.addmm(dense_rows(matrix, some.start, some.stop), b[first : first + step], a).norm(dim=1))
    return torch.cat(lengths)


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise InvalidRequest(f"its tensor {name}, in {tensor.dtype} and scaled, holds numbers that are not finite.")
    return tensor
