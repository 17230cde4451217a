"""The step model of rank 0: `step_model.StepModel` over a model in parts. Each step goes to all ranks and is computed
by all; what is chosen is chosen here."""

import itertools
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.compute.batch import Batch
from penstock.workers.compute.device import bring, fetch
from penstock.workers.compute.device_choice import KeptLogits
from penstock.workers.compute.kernels.choice import Draw
from penstock.workers.compute.kernels.decoder import ChosenTokens
from penstock.workers.compute.lora import AdapterRows, LoraAdapter
from penstock.workers.compute.models.llama import KvCache, Llama, Matrix
from penstock.workers.compute.parallel.messages import Copy, LoadAdapter, Poison, pack_step
from penstock.workers.compute.parallel.part import Part, PartPlan, load_part, with_rows
from penstock.workers.compute.parallel.ranks import Ranks
from penstock.workers.compute.scoring import ScoredRows, WaitScores, score_rows
from penstock.workers.compute.step_model import Wait


class SharedCache:
    """The KV cache of all ranks, each of which holds its own heads of every block."""

    def __init__(self, own: KvCache, ranks: Ranks) -> None:
        self.num_blocks = own.num_blocks
        self.block_size = own.block_size
        self._own = own
        self._ranks = ranks

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._ranks.send(Copy(list(blocks)))
        self._own.copy(blocks)

    def poison(self, blocks: Tensor) -> None:
        self._ranks.send(Poison(blocks.numpy()))
        self._own.poison(blocks)


class ParallelStepModel:
    """Rank 0 and the others. One thread at a time; adapters are read from another."""

    stairs = None
    chosen = None
    takes_chosen = False
    """Only rank 0 knows what was chosen: the other ranks get tokens from the host."""

    def __init__(self, part: Part, ranks: Ranks, folder: tempfile.TemporaryDirectory[str]) -> None:
        """folder: where the ranks have met, which goes when they have ended."""
        self.cache = SharedCache(part.cache, ranks)
        self.is_asynchronous = part.device.type == "cuda"
        self.tables = part.tables
        self._part = part
        self._ranks = ranks
        self._folder = folder
        self._numbers = itertools.count()
        self._keys: weakref.WeakKeyDictionary[LoraAdapter, int] = weakref.WeakKeyDictionary()
        self._new_keys = itertools.count()
        self._dropped: list[int] = []
        """Keys of adapters that are no more, for the next step to tell; other threads add to it."""

    @property
    def model(self) -> Llama:
        return self._part.model

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self._part.max_model_len

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return self._ranks.pids

    def logits(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Tensor:
        return fetch(self._compute(batch, adapter_rows))

    def keep(self, batch: Batch, adapter_rows: list[AdapterRows]) -> KeptLogits | None:
        return KeptLogits(self._compute(batch, adapter_rows)) if self.is_asynchronous else None

    def score(
        self, batch: Batch, adapter_rows: list[AdapterRows], scored: ScoredRows
    ) -> tuple[Tensor | KeptLogits, WaitScores]:
        rows = torch.cat((batch.rows, scored.rows))
        logits = self._compute(with_rows(batch, rows), adapter_rows, is_scored=True)
        num_rows = len(batch.rows)
        scores = score_rows(logits[num_rows:], scored.token_ids, scored.num_top)
        return KeptLogits(logits[:num_rows]) if self.is_asynchronous else logits[:num_rows], scores

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> Wait:
        return bring(self._compute(batch, adapter_rows, is_greedy=True))

    def choose_and_keep(
        self,
        batch: Batch,  # noqa: ARG002 (the host chooses for all)
        adapter_rows: list[AdapterRows],  # noqa: ARG002
        draws: Sequence[Draw | None],  # noqa: ARG002
    ) -> tuple[ChosenTokens, Tensor] | None:
        return None

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> LoraAdapter:
        """An adapter on all ranks, from another thread than the one that runs steps. Raises InvalidRequest, OSError."""
        key = next(self._new_keys)
        try:
            wait_loaded = self._ranks.load_adapter(LoadAdapter(key, digest, folder, max_rank))
            try:
                adapter = self._part.load_adapter(digest, folder, max_rank)
            finally:
                wait_loaded()  # the folder may go when this returns
        except BaseException:
            self._dropped.append(key)
            raise
        self._keys[adapter] = key
        weakref.finalize(adapter, self._dropped.append, key).atexit = False
        return adapter

    def close(self) -> None:
        """End the other ranks."""
        try:
            self._ranks.close()
        finally:
            self._part.close()
            self._folder.cleanup()

    def _compute(
        self, batch: Batch, adapter_rows: list[AdapterRows], *, is_greedy: bool = False, is_scored: bool = False
    ) -> Tensor:
        number = next(self._numbers)
        named = [(self._keys[rows.adapter], rows) for rows in adapter_rows]
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        self._ranks.send(pack_step(number, batch, named, dropped, is_greedy=is_greedy, is_scored=is_scored))
        with self._ranks.step(number, self._count):
            return self._part.compute(batch, adapter_rows, is_greedy=is_greedy, is_scored=is_scored)

    def _count(self) -> int:
        return self._part.group.num_operations


def start_parallel(plan: PartPlan, on_loss: Callable[[str], None]) -> ParallelStepModel:
    """All ranks, which read their weights at the same time. on_loss: see `Ranks`. Raises ConfigError, EngineFault."""
    folder = tempfile.TemporaryDirectory(prefix="penstock-ranks-", ignore_cleanup_errors=True)
    plan = replace(plan, meeting=Path(folder.name) / "meeting")
    ranks = Ranks(plan, on_loss)
    try:
        weights = load_part(plan, 0)
        ranks.wait_built(1)  # so that who meets others meets all
        ranks.meet()
        part = _meet(plan, weights, ranks)
        ranks.wait_built(2)
        if plan.is_on_gpu:  # rank 0 chooses the tokens
            from penstock.workers.compute.triton.sampling.sample import warm_up  # noqa: PLC0415 (Triton may be absent)

            warm_up(plan.model.vocab_size, part.device)
    except BaseException:
        ranks.close()
        folder.cleanup()
        raise
    return ParallelStepModel(part, ranks, folder)


def _meet(plan: PartPlan, weights: Mapping[str, Matrix], ranks: Ranks) -> Part:
    try:
        return Part(plan, 0, weights)
    except RuntimeError:
        ranks.check()  # the cause, if one of them is gone
        raise
