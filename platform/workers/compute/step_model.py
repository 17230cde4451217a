"""A model over its KV cache, as the runner computes steps with it: the logits of a step's rows on the host or, where
the model's device can choose tokens itself, those tokens.

On the CPU the fused kernels choose greedily, and draw where nothing changes the logits. A GPU keeps the logits, of
which `device_choice` chooses every token. Either takes the very token that the host would.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.wire.frames import Stairs
from penstock.workers.compute.batch import Batch
from penstock.workers.compute.device import bring as bring_to_host
from penstock.workers.compute.device_choice import Bring, KeptLogits
from penstock.workers.compute.kernels.choice import Draw
from penstock.workers.compute.kernels.decoder import ChosenTokens
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.fused import FusedLlama, Model
from penstock.workers.compute.models.llama import KvCache, largest
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.models.replay import Replay
from penstock.workers.compute.scoring import ScoredRows, WaitScores, score_rows
from penstock.workers.compute.triton.attention.block_tables import BlockTables
from penstock.workers.compute.truncation import MOST_TOKENS

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
        """Whether the device still computes when `choose` or `keep` has returned."""

    @property
    def stairs(self) -> Stairs | None:
        """See `penstock.workers.engine.runner.Runner`."""

    @property
    def tables(self) -> BlockTables | None:
        """Block tables that stay on the device, by which batches are made; None: each batch brings its own."""

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        """float32 [R, vocab_size] of the batch's rows, on the host. adapter_rows: the adapters of the step."""

    def keep(self, batch: Batch, adapter_rows: list[AdapterRows]) -> KeptLogits | None:
        """Begin the step, whose logits stay on the device. Returns None if nothing has begun, for this device has no
        kernels that choose from them."""

    def score(
        self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows
    ) -> tuple[Tensor | KeptLogits, WaitScores]:
        """`keep`, or `logits` where that gives none, and what waits for what the rows of prompts say that are to be
        scored: their logits stay where they are."""

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Wait | None:
        """Begin the step and the greedy choice of a token for each row. Returns None if nothing has begun."""

    @property
    def chosen(self) -> Tensor | None:
        """What `choose` has chosen last, where it is on the device: token ids of any type, [R], until the next step."""

    @property
    def takes_chosen(self) -> bool:
        """Whether a batch may have tokens that are on the device only (`Batch.before`)."""

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Sequence[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        """The step and a token for each row, chosen as its draw says, with the logits of the rows without one, on the
        host; of those the token is the likeliest. Returns None if nothing was computed and the host must choose from
        the logits of all."""


class HostStepModel:
    """A model whose logits are on the host; in fused kernels it chooses tokens."""

    is_asynchronous = False
    stairs = None
    tables = None
    chosen = None
    takes_chosen = False

    def __init__(self, model: Model, cache: KvCache) -> None:
        self.model = model
        self.cache = cache

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        return self.model.logits(step_of(batch, adapter_rows), self.cache)

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[Tensor, WaitScores]:
        rows = torch.cat((scored.rows, batch.rows))
        logits = self.model.logits(step_of(batch, adapter_rows, rows), self.cache)
        num_scored = len(scored.rows)
        return logits[num_scored:], score_rows(logits[:num_scored], scored.token_ids, scored.num_top)

    def keep(
        self,
        batch: Batch,  # noqa: ARG002 (the host has all logits)
        adapter_rows: list[AdapterRows],  # noqa: ARG002
    ) -> None:
        return None

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Wait | None:
        chosen = self.model.greedy_tokens(step_of(batch, adapter_rows), self.cache)
        return None if chosen is None else lambda: chosen

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Sequence[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        if not isinstance(self.model, FusedLlama) or self.model.config.vocab_size >= MOST_TOKENS:
            return None
        return self.model.choose_tokens(step_of(batch, adapter_rows), self.cache, draws)


class GpuStepModel:
    """A model on a GPU, where tokens are chosen; steps that are recorded are replayed."""

    is_asynchronous = True
    takes_chosen = True

    def __init__(self, replay: Replay, bring: Bring = bring_to_host) -> None:
        """bring: what brings results to the host. Compiles the kernels that choose tokens: seconds."""
        from penstock.workers.compute.triton.sampling.sample import warm_up  # noqa: PLC0415 (Triton may be absent)

        self.model = replay.model
        self.cache = replay.cache
        self.tables = replay.tables
        self.stairs = replay.stairs
        self.chosen: Tensor | None = None
        self._replay = replay
        self._bring = bring
        warm_up(self.model.config.vocab_size, self.model.device)

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        return self._bring(self._on_device(batch, adapter_rows))()

    def keep(self, batch: Batch, adapter_rows: list[AdapterRows]) -> KeptLogits:
        return KeptLogits(self._on_device(batch, adapter_rows), self._bring)

    def score(self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows) -> tuple[KeptLogits, WaitScores]:
        num_rows = len(batch.rows)
        logits = self._on_device(replace(batch, rows=torch.cat((batch.rows, scored.rows))), adapter_rows)
        scores = score_rows(logits[num_rows:], scored.token_ids, scored.num_top, self._bring)
        return KeptLogits(logits[:num_rows], self._bring), scores

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Wait:
        if self._replay.covers(batch, adapter_rows):
            found = self._replay.greedy_on_device(batch, adapter_rows)
        else:
            found = largest(self._on_device(batch, adapter_rows))
        self.chosen = found[0]
        return self._bring(found)

    def choose_and_keep(
        self,
        batch: Batch,  # noqa: ARG002 (`keep` has the logits of all rows)
        adapter_rows: list[AdapterRows],  # noqa: ARG002
        draws: Sequence[Draw | None],  # noqa: ARG002
    ) -> None:
        return None

    def _on_device(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        if self._replay.covers(batch, adapter_rows):
            return self._replay.on_device(batch, adapter_rows)
        adapters = self._replay.segments(batch, adapter_rows) or ()
        return self.model.on_device(step_of(batch, adapters), self.cache)
