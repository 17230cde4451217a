"""What a model is asked to compute at once."""

from typing import NamedTuple

from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.lora import StepAdapters


class ModelStep(NamedTuple):
    """T tokens, and the rows of them whose logits are wanted; see `Batch`."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    rows: Tensor
    """int64 [R], flat indices; with none of them there are no logits."""
    adapter_rows: StepAdapters = ()
    """Adapters, and the tokens they belong to."""
    before: Tensor | None = None
    """Tokens that are on the device only, see `Batch`; only a GPU's models take them."""


def step_of(batch: Batch, adapter_rows: StepAdapters = (), rows: Tensor | None = None) -> ModelStep:
    """The step of a batch. rows: other ones than the batch's."""
    of_step = batch.rows if rows is None else rows
    return ModelStep(batch.token_ids, batch.positions, batch.attention, of_step, adapter_rows, batch.before)
