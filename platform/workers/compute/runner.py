"""The torch runner: computes the engine's steps with a real model. It owns weights, KV cache and sampler; blocks and
sequences are the engine's. How it is made of a checkpoint: `loading`."""

import logging
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from penstock.wire.frames import Constraint, Stairs
from penstock.workers.compute.batch import Batch, build_batch
from penstock.workers.compute.device import CPU
from penstock.workers.compute.device_choice import DeviceChoice, KeptLogits
from penstock.workers.compute.grammar.compiler import GrammarCompiler
from penstock.workers.compute.grammar.masks import MaskThreads
from penstock.workers.compute.grammar.matcher import Matcher
from penstock.workers.compute.host_adapters import HostAdapters
from penstock.workers.compute.kernels.choice import Draw
from penstock.workers.compute.kernels.decoder import ChosenTokens
from penstock.workers.compute.lora import AdapterRows, LoraAdapter, group_rows_by_adapter, load_lora, make_adapter
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.scoring import Scores, find_scored, give_scores
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.compute.step_model import StepModel, Wait
from penstock.workers.engine.sequence import Chunk, Resident, Sampled, Sequence, Step

NO_SCORES = "The model's scores of the prompt are not numbers."

_log = logging.getLogger("penstock.runner")


class Ranks(Protocol):
    """Other processes that have parts of the model (`penstock.workers.compute.parallel`)."""

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> LoraAdapter: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """A drafter that reads what the target's steps leave (`penstock.workers.compute.speculation.head`)."""

    def expect(self, step: Step) -> None:
        """Prepare for a step that is computed next."""

    def take_features(self) -> Tensor | None:
        """What the step computed last has left; None: nothing."""

    def observe(self, chunks: list[Chunk], tapped: Tensor, ignored: Set[Sequence]) -> None:
        """Take what the step of the chunks has left; nothing of the sequences that are ignored."""


class TorchRunner:
    """Satisfies `penstock.workers.engine.runner.Runner`. One thread at a time."""

    def __init__(
        self,
        steps: StepModel,
        sampler: Sampler,
        max_model_len: int,
        drafter: Drafter | None = None,
        compiler: GrammarCompiler | None = None,
        masks: MaskThreads | None = None,
        ranks: Ranks | None = None,
        observer: Observer | None = None,
        host_adapter_bytes: int = 0,
    ) -> None:
        """max_model_len: tokens, not more than the model's RoPE tables and the cache hold. masks: the sampler's; it and
        the compiler are None where no answer is constrained. ranks: where the model is in parts, what loads adapters
        into all of them, and ends them. observer: the drafter, where it wants to see the steps. host_adapter_bytes:
        most bytes of adapters in host memory under the slots."""
        self.num_blocks = steps.cache.num_blocks
        self.max_model_len = max_model_len
        self.eos_token_ids = steps.model.config.eos_token_ids
        self._steps = steps
        self._sampler = sampler
        self._drafter = drafter
        self._compiler = compiler
        self._masks = masks
        self._on_device = DeviceChoice(sampler, masks)
        self._ranks = ranks
        self._observer = observer
        self._host_adapters: HostAdapters[LoraAdapter] = HostAdapters(host_adapter_bytes)
        self._chosen: Tensor | None = None
        """Ids on the device that the step launched last has chosen, one for each of its rows; None: the host chooses
        some of them."""
        self._undrafted: set[Sequence] = set()
        """Sequences beside which the drafter has failed: they go on without it."""

    @property
    def has_constraints(self) -> bool:
        return self._compiler is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps whose tokens are chosen on the GPU are under way when `launch` returns."""
        return self._steps.is_asynchronous

    @property
    def stairs(self) -> Stairs | None:
        return self._steps.stairs

    def can_run_ahead(self, step: Step) -> bool:  # noqa: ARG002 (it is the last one)
        """Whether the step launched last has its tokens where the next one can read them. A grammar's mask would take
        the last token all the same: the engine asks for no such step."""
        return self._chosen is not None

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        """Compute the chunks' KV and choose tokens for those that sample: one, and one more for each accepted token of
        a draft. What is returned ends the step: with what was chosen where the logits are, which then don't leave it,
        or with a choice on the host."""
        if self._observer is not None:
            self._observer.expect(step)
        self.draft(step)
        if self._masks is not None:
            self._masks.begin(step.chunks)
        try:
            with torch.inference_mode():
                choose = self._launch(step)
                self._show(step)
            return choose
        except BaseException:
            if self._steps.tables is not None:
                self._steps.tables.clear()  # nobody knows which of the step's changes were made
            raise

    def _launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        if step.copies:
            self._steps.cache.copy(step.copies)
        batch, adapter_rows = self._build(step, self._chosen), group_rows_by_adapter(step.chunks)
        self._chosen = None
        scored = find_scored(step.chunks, batch.attention.query_start)
        if scored is not None:
            logits, wait_scores = self._steps.score(batch, adapter_rows, scored)
            return partial(self._choose_scored, step, self._begin_choice(step, batch, logits), wait_scores)
        chunks = [step.chunks[index] for index in batch.sampled]
        if self._sampler.are_greedy([chunk.seq for chunk in chunks]):
            wait = self._steps.choose(batch, adapter_rows)
            self._chosen = self._steps.chosen
            if wait is not None:
                return partial(self._verify, step, batch, wait)
        kept = self._steps.keep(batch, adapter_rows)
        if kept is None:
            return self._launch_on_host(step, batch, chunks, adapter_rows)
        choose = self._begin_choice(step, batch, kept)
        if self._steps.takes_chosen:
            self._chosen = self._on_device.chosen
        return choose

    def _build(self, step: Step, chosen: Tensor | None = None) -> Batch:
        """The step as tensors. chosen: by the step before; some of this one's tokens may be among them."""
        batch = build_batch(step, self._steps.cache.block_size, self._steps.tables)
        least, largest = batch.least_and_largest_id
        num_rows = self._steps.model.config.vocab_size
        if largest >= num_rows:  # on a GPU a read beyond the embedding would end all that the process computes there
            raise IndexError(f"token id {largest}, but the embedding has {num_rows} rows")
        if least >= 0:
            return batch
        assert chosen is not None, "a step reads tokens that the one before it did not choose on the device"
        # recordings choose into memory that the next one writes to
        return replace(batch, before=chosen.long())

    def draft(self, step: Step) -> None:
        """Set the drafts of the chunks that have places for them. A drafter that fails makes nothing fail: its
        sequences go on without drafts."""
        if self._drafter is None:
            return
        chunks = [
            chunk
            for chunk in step.chunks
            if chunk.max_drafts and not chunk.num_matched and chunk.seq not in self._undrafted
        ]
        if not chunks:
            return
        try:
            drafts = self._drafter.propose(chunks)
        except Exception:  # noqa: BLE001 whatever it was, the target needs no draft
            _log.exception("The drafter failed beside %d sequences.", len(chunks))
            for chunk in chunks:
                self._drafter.forget(chunk.seq)
                self._undrafted.add(chunk.seq)
            return
        for chunk, draft in zip(chunks, drafts, strict=True):
            chunk.draft = draft

    def _show(self, step: Step) -> None:
        """Let the drafter see the step; one that fails makes nothing fail."""
        if self._observer is None:
            return
        tapped = self._observer.take_features()
        if tapped is None:
            return
        try:
            self._observer.observe(step.chunks, tapped, self._undrafted)
        except Exception:  # noqa: BLE001 whatever it was, the target needs no draft
            _log.exception("The drafter failed over a step of %d sequences.", len(step.chunks))
            for chunk in step.chunks:
                if self._drafter is not None:
                    self._drafter.forget(chunk.seq)
                self._undrafted.add(chunk.seq)

    def forward(self, step: Step) -> tuple[Batch, Tensor]:
        """The batch, and float32 [R, vocab_size] logits of its sampled rows."""
        with torch.inference_mode():
            batch = self._build(step)
            return batch, self._steps.logits(batch, group_rows_by_adapter(step.chunks))

    def choose(self, step: Step, batch: Batch, logits: Tensor) -> list[list[Sampled]]:
        """Choose on the host from the logits of `forward`. One list for each chunk, as of `launch`, empty where a mask
        is late."""
        batch, logits = self._leave_out_late(step, batch, logits)
        chunks = [step.chunks[index] for index in batch.sampled]
        seqs = [chunk.seq for chunk in chunks]
        with torch.inference_mode():
            if len(batch.rows) > len(chunks):
                sampled = self._sampler.verify(logits, seqs, [chunk.draft or [] for chunk in chunks])
            elif chunks:
                choices = self._sampler.sample(logits, seqs, [chunk.end for chunk in chunks])
                sampled = [[choice] for choice in choices]
            else:
                sampled = []
        return _by_chunk(step, batch, sampled)

    def _leave_out_late(self, step: Step, batch: Batch, logits: Tensor) -> tuple[Batch, Tensor]:
        """The batch and its logits without the rows whose masks are not ready."""
        chunks = [step.chunks[index] for index in batch.sampled]
        late = frozenset[Sequence]()
        if self._masks is not None:
            num_rows = sum(chunk.is_sampled for chunk in step.chunks)
            late = self._masks.find_late([chunk.seq for chunk in chunks], num_rows)
        if not late:
            return batch, logits
        kept = [chunk.seq not in late for chunk in chunks]
        of_row = [keep for chunk, keep in zip(chunks, kept, strict=True) for _ in range(1 + len(chunk.draft or ()))]
        rows = torch.tensor(of_row)
        sampled = [index for index, keep in zip(batch.sampled, kept, strict=True) if keep]
        return replace(batch, rows=batch.rows[rows], sampled=sampled), logits[rows]

    def _begin_choice(self, step: Step, batch: Batch, logits: Tensor | KeptLogits) -> Callable[[], list[list[Sampled]]]:
        """Choose where the logits are."""
        if isinstance(logits, Tensor):
            return partial(self.choose, step, batch, logits)
        chunks = [step.chunks[index] for index in batch.sampled]
        wait = self._on_device.launch(chunks, logits, batch.before)
        return lambda: _by_chunk(step, batch, wait())

    def _choose_scored(
        self, step: Step, choose: Callable[[], list[list[Sampled]]], wait_scores: Callable[[], Scores]
    ) -> list[list[Sampled]]:
        """The choices, and the scores of prompts to the chunks that want them."""
        sampled = choose()
        with torch.inference_mode():
            scores = wait_scores()
        for index in give_scores(step.chunks, scores):
            sampled[index] = [Sampled(0, error=NO_SCORES)]
        return sampled

    def _launch_on_host(
        self, step: Step, batch: Batch, chunks: list[Chunk], adapter_rows: list[AdapterRows]
    ) -> Callable[[], list[list[Sampled]]]:
        """Compute the step, whose tokens are chosen on the host: those of rows that nothing changes by the model, where
        it can, so that the logits of the others alone are written."""
        own = [self._sampler.own_draws(chunk.seq, 1 + len(chunk.draft or ())) for chunk in chunks]
        if any(own):
            draws: list[Draw | None] = []
            for chunk, row_draws in zip(chunks, own, strict=True):
                draws += row_draws or [None] * (1 + len(chunk.draft or ()))
            kept = self._steps.choose_and_keep(batch, adapter_rows, draws)
            if kept is not None:
                chosen, logits = kept
                if None not in own:
                    return partial(self._verify, step, batch, lambda: chosen)
                return partial(self._choose_rest, step, batch, [row is None for row in own], chosen, logits)
        return partial(self.choose, step, batch, self._steps.logits(batch, adapter_rows))

    def _choose_rest(
        self, step: Step, batch: Batch, wanted: list[bool], chosen: ChosenTokens, logits: Tensor
    ) -> list[list[Sampled]]:
        """`choose` for the chunks that are wanted, of whose rows these are the logits; the others have their tokens,
        and so have chunks without drafts whose grammar allows them."""
        ids, scores = chosen.ids.tolist(), chosen.scores.tolist()
        quick: dict[int, list[Sampled]] = {}
        rest: list[int] = []
        kept: list[int] = []
        first = first_kept = 0
        for index, is_wanted in zip(batch.sampled, wanted, strict=True):
            chunk = step.chunks[index]
            draft = chunk.draft or []
            end = first + 1 + len(draft)
            if is_wanted:
                accepted = None if draft else self._sampler.accept(chunk.seq, ids[first], scores[first])
                if accepted is not None:
                    quick[index] = [accepted]
                else:
                    rest.append(index)
                    kept += range(first_kept, first_kept + end - first)
                first_kept += end - first
            else:
                [quick[index]] = self._sampler.verify_chosen(ids[first:end], scores[first:end], [draft])
            first = end
        if rest:
            # of the batch's rows only the number counts
            own = logits if len(kept) == len(logits) else logits[kept]
            found = self.choose(step, replace(batch, rows=batch.rows[: len(kept)], sampled=rest), own)
        else:
            found = [[] for _ in step.chunks]
        for index, choices in quick.items():
            found[index] = choices
        return found

    def _verify(self, step: Step, batch: Batch, wait: Wait) -> list[list[Sampled]]:
        """Wait for what the model has chosen, and end each draft where it differs."""
        with torch.inference_mode():
            token_ids, scores = wait()
        drafts = [step.chunks[index].draft or [] for index in batch.sampled]
        return _by_chunk(step, batch, self._sampler.verify_chosen(token_ids.long().tolist(), scores.tolist(), drafts))

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> LoraAdapter:
        """Read an adapter, from another thread than the one that runs steps. Raises InvalidRequest for one that does
        not fit the model, OSError."""
        if self._ranks is not None:
            return self._ranks.load_adapter(digest, folder, max_rank)
        model = self._steps.model
        on_host = model.device.type == "cpu"
        load = partial(
            load_lora, digest, folder, model.config, max_rank, model.dtype, CPU,
            packed_bits=model.packed_adapter_bits, base=model.weights if on_host else None,
        )  # fmt: skip
        held = self._host_adapters.get(digest, load)
        return held if on_host else make_adapter(digest, held.layers, held.num_bytes, model.device)

    def unload_adapter(self, adapter: Resident) -> None:
        """Note that an adapter has left its slot. On the host it is held on, as far as there is room."""
        assert isinstance(adapter, LoraAdapter)
        if self._steps.model.device.type == "cpu" and self._ranks is None:
            self._host_adapters.keep(adapter)
        else:
            self._host_adapters.touch(adapter.digest)

    def forget_adapter(self, digest: str) -> None:
        """Hold a deleted adapter no longer."""
        self._host_adapters.forget(digest)

    def compile_grammar(self, constraint: Constraint, tenant: str, output: list[int]) -> Matcher:
        """Compile a constraint, from another thread than the one that runs steps. Raises InvalidRequest, and
        ConfigError where the checkpoint has no tokenizer."""
        assert self._compiler is not None
        return self._compiler.compile(constraint, tenant, output)

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept of a sequence, which has ended."""
        self._sampler.forget(seq)
        self._on_device.forget(seq)
        self._undrafted.discard(seq)
        if self._steps.tables is not None:
            self._steps.tables.forget(seq)
        if self._drafter is not None:
            self._drafter.forget(seq)

    def close(self) -> None:
        """End the processes that have parts of the model, if there are any."""
        if self._ranks is not None:
            self._ranks.close()

    def poison(self, blocks: Iterable[int]) -> None:
        """Fill blocks with NaN, so that a read of what their owner did not write shows. For tests."""
        with torch.inference_mode():
            self._steps.cache.poison(torch.tensor(list(blocks), dtype=torch.int64))


def _by_chunk(step: Step, batch: Batch, sampled: list[list[Sampled]]) -> list[list[Sampled]]:
    """What was chosen for the chunks that sample, with an empty list for each of the others."""
    choices: list[list[Sampled]] = [[] for _ in step.chunks]
    for index, found in zip(batch.sampled, sampled, strict=True):
        choices[index] = found
    return choices
