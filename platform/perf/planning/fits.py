"""Whether a model can be in a memory at all, by the least that it takes: what is refused before a weight is read.

Not a plan (`memory`), which counts what a good pool needs: here only what must be there, so that nothing is refused
that would have started. Pure.
"""

from typing import NamedTuple

from penstock.perf.planning.formats import (
    BF16,
    INT4,
    Head,
    WeightFormat,
    matrix_bytes,
    scale_bytes,
    table_bytes,
    weight_bytes,
)
from penstock.perf.planning.shape import ModelShape

GB = 10**9
MOST_PARTS = 8
"""Cards that a sentence proposes at most."""


class Least(NamedTuple):
    """The least that a replica takes, of one model."""

    shape: ModelShape
    form: WeightFormat
    head: Head
    kv_bytes: int
    """Size of the KV cache that is configured, or of the least that is any use; of each part."""
    parts: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes in each part's memory."""
        return round(weight_bytes(self.shape, self.form, self.head) / self.parts) + self.kv_bytes

    def describe(self) -> str:
        """The sum."""
        shape, form = self.shape, self.form
        layers = (matrix_bytes(shape, form) + scale_bytes(shape, form)) / self.parts
        tables = table_bytes(shape, form, self.head) / self.parts
        whose = "" if self.parts == 1 else f" in each of {self.parts} parts"
        return (
            f"{shape.name} takes {_gb(self.num_bytes)}{whose}: {_gb(layers)} for the layers' weights in {form.name}, "
            f"{_gb(tables)} for embedding and head, {_gb(self.kv_bytes)} for keys and values"
        )


def why_not(least: Least, allowed_bytes: int, memory: str) -> str | None:
    """A sentence with the sum and what would fit, where a model can't fit; None: it may. memory: what it is that has
    `allowed_bytes`."""
    if least.num_bytes <= allowed_bytes:
        return None
    return f"{least.describe()}; {memory} has {_gb(allowed_bytes)}. {_propose(least, allowed_bytes)}"


def _propose(least: Least, allowed_bytes: int) -> str:
    ways = []
    weights = least._replace(kv_bytes=0)
    if weights.num_bytes < allowed_bytes:
        ways.append(f"a KV cache of {_gb(allowed_bytes - weights.num_bytes)} at most (engine.kv_memory_bytes)")
    smaller = least._replace(form=INT4, head="auto")
    if least.form.bits > INT4.bits and smaller.num_bytes <= allowed_bytes:
        ways.append(f"the model in 4 bits, {_gb(smaller.num_bytes)} (penstock quantize)")
    parts = next(
        (
            parts
            for parts in range(least.parts + 1, MOST_PARTS + 1)
            if not least.shape.num_heads % parts and least._replace(parts=parts).num_bytes <= allowed_bytes
        ),
        None,
    )
    if parts is not None:
        ways.append(f"engine.tensor_parallel_size: {parts}, on as many GPUs")
    if ways:
        return f"What would fit: {'; '.join(ways)}."
    most = int(allowed_bytes / (INT4.bits + INT4.group_bits / (INT4.group or 1)) * BF16.bits / 2)
    return f"In 4 bits a model of about {most / GB:.1f} billion parameters would fit."


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes < 10 * GB else f"{num_bytes / GB:.1f} GB"
