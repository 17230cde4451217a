"""A model over its KV cache, as the runner computes steps with it: the logits of a step's rows on the host or, where
the model's device can choose tokens itself, those tokens.

`Sampler` decides which rows may be chosen there: only those for which the device takes the very token that the
host would. On the CPU the fused kernels choose greedily; a GPU also samples with noise.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.workers.compute.batch import Batch
from penstock.workers.compute.device import fetch
from penstock.workers.compute.kernels.decoder import GreedyTokens
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.fused import FusedLlama, Model
from penstock.workers.compute.models.llama import KvCache, largest
from penstock.workers.compute.models.replay import Replay
from penstock.workers.compute.scoring import ScoredRows, Scores, score_rows
from penstock.workers.compute.triton.sampling_inputs import SamplingInputs

Wait = Callable[[], Iterable[Tensor]]
"""Waits for the device: the ids chosen for a step's rows, [R] of any type, and each row's largest logit, [R]."""


class BlockCache(Protocol):
    """The KV cache as the runner sees it; see `models.llama.KvCache`."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def copy(self, blocks: Sequence[tuple[int, int]]) -> None: ...
    def poison(self, blocks: Tensor) -> None: ...


class StepModel(Protocol):
    @property
    def model(self) -> Model: ...
    @property
    def cache(self) -> BlockCache: ...
    @property
    def is_asynchronous(self) -> bool:
        """Whether the device still computes when `choose` has returned."""

    @property
    def can_sample(self) -> bool:
        """Whether `choose` takes sampling inputs; greedily it may always choose."""

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        """float32 [R, vocab_size] of the batch's rows, on the host. adapter_rows: the adapters of the step."""

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[Tensor, Scores]:
        """`logits`, and what the rows of prompts say that are to be scored: their logits stay where they are."""

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows], inputs: SamplingInputs | None) -> Wait | None:
        """Begin the step and the choice of a token for each row: greedily without `inputs`. Returns None if nothing has
        begun and the host must choose from the logits."""

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], wanted: Sequence[bool]
    ) -> tuple[GreedyTokens, Tensor] | None:
        """The step, and greedily a token for each row, with the logits of the rows that are wanted, on the host.
        Returns None if nothing was computed and the host must choose from the logits of all."""


class HostStepModel:
    """A model whose logits are on the host; in fused kernels it chooses greedy tokens of steps without adapters."""

    is_asynchronous = False
    can_sample = False

    def __init__(self, model: Model, cache: KvCache) -> None:
        self.model = model
        self.cache = cache

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        return self.model.logits(
            batch.token_ids, batch.positions, self.cache, batch.attention, batch.rows, adapter_rows
        )

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[Tensor, Scores]:
        rows = torch.cat((scored.rows, batch.rows))
        logits = self.model.logits(batch.token_ids, batch.positions, self.cache, batch.attention, rows, adapter_rows)
        num_scored = len(scored.rows)
        return logits[num_scored:], score_rows(logits[:num_scored], scored.token_ids, scored.num_top)

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows], inputs: SamplingInputs | None) -> Wait | None:
        if adapter_rows or inputs is not None:
            return None
        chosen = self.model.greedy_tokens(batch.token_ids, batch.positions, self.cache, batch.attention, batch.rows)
        return None if chosen is None else lambda: chosen

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], wanted: Sequence[bool]
    ) -> tuple[GreedyTokens, Tensor] | None:
        if adapter_rows or not isinstance(self.model, FusedLlama):
            return None
        return self.model.greedy_tokens_and_logits(
            batch.token_ids, batch.positions, self.cache, batch.attention, batch.rows, wanted
        )


class GpuStepModel:
    """A model on a GPU, which chooses tokens greedily and with noise; decode steps without adapters are replayed."""

    is_asynchronous = True
    can_sample = True

    def __init__(self, replay: Replay) -> None:
        self.model = replay.model
        self.cache = replay.cache
        self._replay = replay

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        if self._is_replayed(batch, adapter_rows):
            return self._replay.logits(batch)
        return self.model.logits(
            batch.token_ids, batch.positions, self.cache, batch.attention, batch.rows, adapter_rows
        )

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[Tensor, Scores]:
        rows = torch.cat((scored.rows, batch.rows))
        logits = self.model.on_device(batch.token_ids, batch.positions, self.cache, batch.attention, rows, adapter_rows)
        num_scored = len(scored.rows)
        scores = score_rows(logits[:num_scored], scored.token_ids, scored.num_top)
        return fetch(logits[num_scored:]), scores

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows], inputs: SamplingInputs | None) -> Wait:
        if inputs is None and self._is_replayed(batch, adapter_rows):
            return self._replay.greedy_on_device(batch).cpu
        logits = self._on_device(batch, adapter_rows)
        return partial(fetch, largest(logits) if inputs is None else sample_on_device(logits, inputs))

    def choose_and_keep(
        self,
        batch: Batch,  # noqa: ARG002 (the host chooses for all)
        adapter_rows: list[AdapterRows],  # noqa: ARG002
        wanted: Sequence[bool],  # noqa: ARG002
    ) -> tuple[GreedyTokens, Tensor] | None:
        return None

    def _on_device(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        if self._is_replayed(batch, adapter_rows):
            return self._replay.on_device(batch)
        return self.model.on_device(
            batch.token_ids, batch.positions, self.cache, batch.attention, batch.rows, adapter_rows
        )

    def _is_replayed(self, batch: Batch, adapter_rows: list[AdapterRows]) -> bool:
        return not adapter_rows and self._replay.covers(batch)


def sample_on_device(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Ids and largest logits, [2, R], chosen with noise where the logits are."""
    from penstock.workers.compute.triton.sample import sample  # noqa: PLC0415 (Triton may be absent)

    return sample(logits, inputs.on(logits.device))
