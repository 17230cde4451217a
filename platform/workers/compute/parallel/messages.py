"""What rank 0 tells the other ranks, and what they answer. Plain data: tensors travel as numpy arrays, pickled, between
processes of one replica."""

import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

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
    """The rank has its weights; sent again when it has met the others and can compute."""


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
    packed = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    for connection in connections:
        connection.send_bytes(packed)


def receive(connection: Connection) -> object:
    """The next message. Raises EOFError or OSError where the other end is gone."""
    return pickle.loads(connection.recv_bytes())  # from another process of this replica
