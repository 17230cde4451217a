"""Tokens that fused steps choose and draw: those that are chosen from their logits."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Batch, Span, lay_out
from penstock.workers.compute.choice import choose_by_numpy
from penstock.workers.compute.kernels.choice import GREEDY, ChoiceInput, Draw
from penstock.workers.compute.kernels.decoder import ChosenTokens
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.lora import AdapterRows
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.models.llama import KvCache
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.compute.truncation import MOST_TOKENS
from penstock.workers.engine.sequence import Chunk, Sampled, Sequence, Step
from tests.unit.workers.fused_models import (
    BLOCK,
    MAX_LEN,
    PLAIN,
    Tables,
    make_pair,
    random_weights,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def two_prompts(kernels: Library) -> tuple[FusedLlama, ModelStep, KvCache]:
    """A model, and a step with five rows of two prompts."""
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    token_ids, positions, attention = lay_out([tables.span(0, 0, 30), tables.span(1, 0, 7)], BLOCK)
    return fused, ModelStep(token_ids, positions, attention, torch.tensor([36, 0, 12, 29, 31])), tables.cache()


def test_the_best_are_the_first_of_the_largest_logits(kernels: Library) -> None:
    fused, step, cache = two_prompts(kernels)

    logits = fused.logits(step, cache)
    best = fused.greedy_tokens(step, cache)

    assert torch.equal(best.ids, logits.argmax(-1))
    assert torch.equal(best.scores, logits.amax(-1))


def test_logits_of_some_rows_are_those_of_all_and_the_best_of_all_are_there(kernels: Library) -> None:
    fused, step, cache = two_prompts(kernels)
    wanted = [False, True, False, False, True]
    draws = [None if is_wanted else GREEDY for is_wanted in wanted]

    logits = fused.logits(step, cache)
    best, some = fused.choose_tokens(step, cache, draws)
    none_wanted = fused.choose_tokens(step, cache, [GREEDY] * 5)

    assert torch.equal(some, logits[torch.tensor(wanted)])
    assert torch.equal(best.ids, logits.argmax(-1))
    assert torch.equal(none_wanted[0].ids, best.ids)
    assert none_wanted[1].shape == (0, PLAIN.vocab_size)


def random_draws(number: int) -> list[Draw | None]:
    """How rows' tokens are chosen: from all, from some, greedily, or not in the step."""
    rng = random.Random(number)
    cuts = [(0, 1.0, -math.inf)] * 4 + [(5, 1.0, -math.inf), (0, 0.6, -math.inf), (0, 1.0, -1.5), (40, 0.9, -3.0)]
    return [
        rng.choice((None, GREEDY))
        if rng.random() < 0.25
        else Draw(rng.choice((1e-5, 0.3, 0.8, 2.0)), *rng.choice(cuts), rng.getrandbits(64))
        for _ in range(40)
    ]


def as_numpy_chooses(row: Tensor, draw: Draw | None) -> int:
    logits = row.numpy()
    chosen = choose_by_numpy(ChoiceInput(logits, logits, *(draw or GREEDY), None))
    assert chosen is not None
    return chosen.token_id


@pytest.mark.parametrize("level", [Level.PORTABLE, Level.AVX2, Level.VNNI])
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_are_drawn_in_the_step_as_from_its_logits(kernels: Library, level: Level, threads: int) -> None:
    if not kernels.matmul.set_level(level):
        pytest.skip(f"this CPU does not have {level.name}")
    try:
        _, fused = make_pair(replace(PLAIN, vocab_size=2500, is_tied=False), kernels, threads)
        tables = Tables(PLAIN)
        token_ids, positions, attention = lay_out([tables.span(0, 0, 30), tables.span(1, 0, 10)], BLOCK)
        step, cache = ModelStep(token_ids, positions, attention, torch.arange(40)), tables.cache()
        logits = fused.logits(step, cache)
        for number in range(12):
            draws = random_draws(number)

            chosen, some = fused.choose_tokens(step, cache, draws)

            assert chosen.ids.tolist() == [as_numpy_chooses(*each) for each in zip(logits, draws, strict=True)]
            assert torch.equal(chosen.scores, logits.amax(-1))
            assert torch.equal(some, logits[torch.tensor([draw is None for draw in draws])])
    finally:
        kernels.matmul.set_level(None)


def test_equal_logits_give_the_lowest_id_and_nan_is_seen(kernels: Library, portable: None) -> None:
    weights = {
        name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in random_weights(PLAIN).items()
    }
    weights["embed"][100:103] = weights["embed"][7]
    packed = pack_all(weights.items(), kernels.matmul, torch.float32)
    fused = FusedLlama(PLAIN, packed, MAX_LEN, 2, kernels)
    tables = Tables(PLAIN)
    cache = tables.cache()

    def best_behind(token: int, place: int) -> ChosenTokens:
        token_ids, positions, attention = lay_out([Span([token], place, tables.span(place, 0, 10).block_table)], BLOCK)
        return fused.greedy_tokens(ModelStep(token_ids, positions, attention, torch.tensor([0])), cache)

    found = {int(best_behind(token, 0).ids) for token in range(40)}

    assert not {100, 101, 102} & found
    assert best_behind(7, 9).scores.isnan().all()


def test_the_runner_chooses_the_same_tokens_with_and_without_logits(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    plain, mixed = (
        TorchRunner(HostStepModel(fused, tables.cache()), Sampler(PLAIN.vocab_size), MAX_LEN) for _ in range(2)
    )
    tokens = list(range(20, 33))

    def chunk(seed: int, **params: float) -> Chunk:
        sampling = SamplingParams(max_tokens=4, temperature=0.0, **params)  # type: ignore[arg-type]
        seq = Sequence("r", [token + seed for token in tokens], sampling, 13, [], b"", 0.0)
        seq.block_table = tables.span(seed, 0, 16).block_table
        return Chunk(seq, 0, 13, 3, [41, 42])

    greedy = plain.launch(Step([chunk(1), chunk(2)], []))()
    with_penalty = mixed.launch(Step([chunk(1), chunk(2, presence_penalty=1e-9)], []))()

    assert [[choice.token_id for choice in choices] for choices in greedy] == [
        [choice.token_id for choice in choices] for choices in with_penalty
    ]


class LogitsAlone(HostStepModel):
    """Steps whose tokens are all chosen from logits."""

    def choose(self, batch: Batch, adapter_rows: list[AdapterRows]) -> None:
        return None

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Iterable[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        return None


class InStep(HostStepModel):
    """Steps that note which rows' logits they keep."""

    num_kept: int | None = None

    def choose_and_keep(
        self, batch: Batch, adapter_rows: list[AdapterRows], draws: Iterable[Draw | None]
    ) -> tuple[ChosenTokens, Tensor] | None:
        rows = list(draws)
        self.num_kept = rows.count(None)
        return super().choose_and_keep(batch, adapter_rows, rows)


PLAIN_DRAWS: list[dict[str, Any]] = [
    {}, {"top_p": 0.7}, {"temperature": 0.0}, {"top_k": 3, "temperature": 1.5}, {"min_p": 0.2},
    {"logprobs": 1, "logprobs_tokens": 2}, {"min_tokens": 2},
]  # fmt: skip
"""Parameters of tokens that are drawn in the step, behind two tokens of output; the next ones are not."""
OTHERS: list[dict[str, Any]] = [
    {"logprobs": 2}, {"presence_penalty": 1.0}, {"temperature": math.inf}, {"min_tokens": 9, "stop_token_ids": (5, 6)},
    {"logprobs": 1, "logprobs_tokens": 3},
]  # fmt: skip


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_runner_draws_the_same_tokens_with_and_without_logits(kernels: Library, has_drafts: bool) -> None:
    """Drafts are the tokens that are chosen, so that all of their rows count."""
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    steps = InStep(fused, tables.cache())
    in_step, from_logits = (
        TorchRunner(each, Sampler(PLAIN.vocab_size), MAX_LEN) for each in (steps, LogitsAlone(fused, tables.cache()))
    )
    drafts: dict[int, list[int]] = {}

    def chosen(runner: TorchRunner, params: list[dict[str, Any]]) -> list[list[Sampled]]:
        chunks = []
        for number, own in enumerate(params):
            sampling = SamplingParams(**{"max_tokens": 9, "temperature": 0.8, "seed": number} | own)
            ids = [20 + number + place for place in range(13)]
            seq = Sequence(f"r{number}", ids, sampling, 11, [], b"", 0.0)
            seq.block_table = tables.span(number, 0, 16).block_table
            chunks.append(Chunk(seq, 0, 13, 3, drafts.get(number)))
        return runner.launch(Step(chunks, []))()

    params = PLAIN_DRAWS + OTHERS
    for _ in range(2 if has_drafts else 0):
        for number, found in enumerate(chosen(from_logits, params)):
            drafts[number] = [each.token_id for each in found] if found[0].error is None else [1]
    alone = chosen(in_step, PLAIN_DRAWS)

    assert steps.num_kept == 0
    assert alone == chosen(from_logits, PLAIN_DRAWS)
    assert all(len(found) == (3 if has_drafts else 1) for found in alone)
    assert chosen(in_step, params) == chosen(from_logits, params)
    assert steps.num_kept == sum(1 + len(drafts.get(len(PLAIN_DRAWS) + n, ())) for n in range(len(OTHERS)))
    assert chosen(in_step, params)[: len(PLAIN_DRAWS)] == alone


def test_a_vocabulary_too_large_for_draws_in_a_step_is_chosen_from_by_numpy(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    fused.config = replace(PLAIN, vocab_size=MOST_TOKENS)
    steps = HostStepModel(fused, Tables(PLAIN).cache())

    assert steps.choose_and_keep(None, [], [GREEDY]) is None  # type: ignore[arg-type]


def test_a_row_that_is_not_of_numbers_has_no_draw_and_its_neighbours_have(kernels: Library, portable: None) -> None:
    weights = {
        name: weight.bfloat16() if weight.dim() > 1 else weight for name, weight in random_weights(PLAIN).items()
    }
    fused = FusedLlama(PLAIN, pack_all(weights.items(), kernels.matmul, torch.float32), MAX_LEN, 2, kernels)
    tables = Tables(PLAIN)
    parts = [tables.span(0, 0, 10), Span([7], 9, tables.span(9, 0, 10).block_table)]
    token_ids, positions, attention = lay_out(parts, BLOCK)  # the second reads what nobody has written
    step, cache = ModelStep(token_ids, positions, attention, torch.tensor([9, 10])), tables.cache()
    draw = Draw(0.8, 0, 1.0, -math.inf, 3)
    for draws in ([draw, draw], [draw._replace(top_p=0.5)] * 2):
        chosen, _ = fused.choose_tokens(step, cache, draws)

        assert chosen.scores.isnan().tolist() == [False, True]
        assert int(chosen.ids[0]) == as_numpy_chooses(fused.logits(step, cache)[0], draws[0])
