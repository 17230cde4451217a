"""What rank 0 tells the other ranks, and what they answer. Plain data, pickled, between processes of one replica; but a
step, for which all ranks wait, is the bytes of its arrays behind a header, which takes a quarter of pickle's time."""

import math
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.lora import AdapterRows, LoraAdapter
from penstock.workers.compute.parallel.part import PartPlan
from penstock.workers.compute.triton.attention.block_tables import BlockTables, StepTables

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64 | np.int32]]


class Beginning(NamedTuple):
    """The first message that a rank gets."""

    plan: PartPlan
    rank: int


class Compute(NamedTuple):
    """A step to compute."""

    number: int
    """Steps since the start."""
    arrays: tuple[Array, ...]
    """Batch: token_ids, positions, query_start, context_len, block_tables, slot_mapping, rows; where block tables stay
    on the devices, also rows, places and blocks of `StepTables`."""
    adapters: list[tuple[int, Array | None]]
    """Key of each adapter of the step, and its rows; None: all of them."""
    is_greedy: bool
    """Whether rank 0 wants the largest logits only."""
    is_scored: bool
    """Whether rows of prompts are among the rows."""
    dropped: list[int]
    """Keys of adapters that no step will use again."""


class Copy(NamedTuple):
    """Blocks of the KV cache to copy, each to where its pair says."""

    blocks: list[tuple[int, int]]


class Poison(NamedTuple):
    """Blocks of the KV cache to fill with NaN."""

    blocks: Array


Order = Compute | Copy | Poison
"""Carried out in the order in which it is sent."""


class LoadAdapter(NamedTuple):
    """An adapter to read, beside the steps."""

    key: int
    digest: str
    folder: Path
    max_rank: int


class Built(NamedTuple):
    """The rank has its weights, and waits for `Meet`; sent again when it has met the others and can compute."""


class Loaded(NamedTuple):
    """The end of reading an adapter."""

    key: int
    error: str | None
    """Why the rank does not have it; None: it does."""


class Failed(NamedTuple):
    """A rank's failure to compute a step, or to start."""

    number: int | None
    """Step that failed; None: the start."""
    num_operations: int
    """Operations of the rank's `Group` until then."""
    error: str


class Meet(NamedTuple):
    """All ranks have their weights, and are to meet: sent once."""


Answer = Built | Loaded | Failed


def pack_step(
    number: int,
    batch: Batch,
    adapters: list[tuple[int, AdapterRows]],
    dropped: list[int],
    *,
    is_greedy: bool,
    is_scored: bool,
) -> Compute:
    """The order to compute a batch. adapters: key and rows of each."""
    attention = batch.attention
    tensors = (
        batch.token_ids,
        batch.positions,
        attention.query_start,
        attention.context_len,
        attention.block_tables,
        attention.slot_mapping,
        batch.rows,
        *(() if attention.tables is None else attention.tables[1:]),
    )
    named = [(key, None if rows.rows is None else rows.rows.numpy()) for key, rows in adapters]
    return Compute(number, tuple(tensor.numpy() for tensor in tensors), named, is_greedy, is_scored, dropped)


def unpack_step(
    order: Compute, adapters: dict[int, LoraAdapter], own: BlockTables | None
) -> tuple[Batch, list[AdapterRows]]:
    """The batch of an order, and its adapters out of those that the rank has, by key. own: the rank's tables."""
    token_ids, positions, query_start, context_len, block_tables, slots, rows, *changes = map(
        torch.from_numpy, order.arrays
    )
    tables = StepTables(own.table, *changes) if own is not None and changes else None
    attention = AttentionBatch(query_start, context_len, block_tables, slots, tables=tables)
    batch = Batch(token_ids, positions, attention, rows, [])
    return batch, [
        AdapterRows(adapters[key], None if rows_of is None else torch.from_numpy(rows_of))
        for key, rows_of in order.adapters
    ]


def send(connections: Sequence[Connection], message: object) -> None:
    """Send a message to all. Raises OSError where one of them is gone."""
    packed = encode(message)
    for connection in connections:
        connection.send_bytes(packed)


def receive(connection: Connection) -> object:
    """The next message. Raises EOFError or OSError where the other end is gone."""
    return decode(connection.recv_bytes())


def encode(message: object) -> bytes:
    """A message as one piece of bytes."""
    if not isinstance(message, Compute):
        return _PICKLED + pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    arrays = [*message.arrays, *(rows for _, rows in message.adapters if rows is not None)]
    header = _Header(
        message.number,
        [(array.dtype.str, array.shape) for array in arrays],
        [(key, rows is not None) for key, rows in message.adapters],
        message.is_greedy,
        message.is_scored,
        message.dropped,
    )
    packed = _PACK.encode(header)
    head = _STEP + len(packed).to_bytes(_ALIGNED - len(_STEP), "little") + packed
    pieces = (head, *(array.tobytes() for array in arrays))
    return b"".join(piece + bytes(-len(piece) % _ALIGNED) for piece in pieces)


def decode(packed: bytes) -> object:
    """The message of `encode`, from another process of this replica."""
    if packed[:1] == _PICKLED:
        return pickle.loads(memoryview(packed)[1:])
    place = _ALIGNED + int.from_bytes(packed[1:_ALIGNED], "little")
    header = _UNPACK.decode(memoryview(packed)[_ALIGNED:place])
    memory = bytearray(packed)  # torch takes no memory that can't be written to
    arrays: list[Array] = []
    for kind, shape in header.arrays:
        place += -place % _ALIGNED
        arrays.append(np.frombuffer(memory, kind, math.prod(shape), place).reshape(shape))
        place += arrays[-1].nbytes
    num_rows = sum(has_rows for _, has_rows in header.adapters)
    rows = iter(arrays[len(arrays) - num_rows :])
    adapters = [(key, next(rows) if has_rows else None) for key, has_rows in header.adapters]
    own = tuple(arrays[: len(arrays) - num_rows])
    return Compute(header.number, own, adapters, header.is_greedy, header.is_scored, header.dropped)


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """A step without the numbers of its arrays, which follow, each from a multiple of _ALIGNED bytes on."""

    number: int
    arrays: list[tuple[str, tuple[int, ...]]]
    """Type and shape of each, those of adapters last."""
    adapters: list[tuple[int, bool]]
    """Key of each, and whether it has rows of its own."""
    is_greedy: bool
    is_scored: bool
    dropped: list[int]


_PICKLED, _STEP = b"\0", b"\1"
_ALIGNED = 8
_PACK, _UNPACK = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Header)
