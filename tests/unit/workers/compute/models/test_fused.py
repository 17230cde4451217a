"""Fused steps against torch's decoder: every feature of the family, mixed steps, scattered blocks, NaN wherever nobody
wrote."""

import pytest
import torch

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch, lay_out
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.models.model_step import ModelStep, step_of
from penstock.workers.compute.quant.packed import UnsupportedMatrix, pack_all
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.fused_models import BLOCK, CONFIGS, PLAIN, STEPS, Tables, logits_of, make_pair, random_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_torch(name: str, kernels: Library, portable: None) -> None:
    config = CONFIGS[name]
    oracle, fused = make_pair(config, kernels)
    tables = Tables(config)
    caches = tables.cache(), tables.cache()

    for parts in STEPS:
        expected = logits_of(oracle, caches[0], tables, parts)
        torch.testing.assert_close(logits_of(fused, caches[1], tables, parts), expected, atol=1e-4, rtol=1e-4)
        for part in parts:
            tables.span(*part)
    for (keys, values), (fused_keys, fused_values) in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(fused_keys, keys, atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(fused_values, values, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("level", [None, Level.VNNI, Level.AVX2, Level.PORTABLE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_every_level_and_cache_layoutat_gives_nearly_the_same_logits(
    level: Level | None, dtype: torch.dtype, kernels: Library
) -> None:
    oracle, fused = make_pair(CONFIGS["wide groups"], kernels)
    tables = Tables(oracle.config)
    caches = tables.cache(), tables.cache(dtype)
    if not kernels.matmul.set_level(level):
        pytest.skip("this CPU does not have these instructions")
    try:
        for parts in STEPS:
            expected, found = logits_of(oracle, caches[0], tables, parts), logits_of(fused, caches[1], tables, parts)
            assert (found - expected).square().mean().sqrt() < 0.04 * expected.std()
    finally:
        kernels.matmul.set_level(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_has_the_same_bits_alone_and_in_any_step_of_few_rows(dtype: torch.dtype, kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    together, alone = tables.cache(dtype), tables.cache(dtype)
    parts = [(0, 0, 9), (1, 0, 6), (2, 0, 1)]

    whole = logits_of(fused, together, tables, parts)

    assert torch.equal(torch.cat([logits_of(fused, alone, tables, [part]) for part in parts]), whole)
    assert torch.equal(
        logits_of(fused, together, tables, [(2, 1, 1), (0, 9, 2)])[1:], logits_of(fused, alone, tables, [(0, 9, 2)])
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int, kernels: Library) -> None:
    one, several = (make_pair(CONFIGS["untied, with biases"], kernels, count)[1] for count in (1, threads))
    tables = Tables(one.config)
    caches = tables.cache(), tables.cache()

    for parts in STEPS:
        assert torch.equal(logits_of(one, caches[0], tables, parts), logits_of(several, caches[1], tables, parts))


def test_a_step_without_rows_only_writes_the_cache(kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    cache = tables.cache()

    token_ids, positions, attention = lay_out([tables.span(0, 0, 9)], BLOCK)
    logits = fused.logits(ModelStep(token_ids, positions, attention, torch.zeros(0, dtype=torch.int64)), cache)

    assert logits.shape == (0, PLAIN.vocab_size)
    assert not any(part[tables.tables[0][0], :, :9].isnan().any() for pair in cache.layers for part in pair)


def test_dense_float32_matrices_are_left_to_torch(kernels: Library) -> None:
    with pytest.raises(UnsupportedMatrix, match=r"embed is dense in torch\.float32"):
        pack_all(random_weights(PLAIN).items(), kernels.matmul, torch.float32)


def test_build_batch_feeds_fused_steps(kernels: Library) -> None:
    """The runner's own batches, drafts included, against flat ones."""
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    span = tables.span(0, 0, 8)
    seq = Sequence("r", span.token_ids[:6], SamplingParams(max_tokens=4), 6, [], b"", 0.0)
    seq.block_table = span.block_table
    batch = build_batch(Step([Chunk(seq, 0, 6, 2, span.token_ids[6:])], []), BLOCK)

    logits = fused.logits(step_of(batch), tables.cache())

    assert torch.equal(logits, logits_of(fused, tables.cache(), tables, [(0, 0, 8)])[5:])


@pytest.mark.parametrize("token_id", [-1, PLAIN.vocab_size])
def test_an_id_without_a_row_in_the_embedding_is_refused(token_id: int, kernels: Library) -> None:
    _, fused = make_pair(PLAIN, kernels)
    tables = Tables(PLAIN)
    _, positions, attention = lay_out([tables.span(0, 0, 2)], BLOCK)

    with pytest.raises(IndexError, match=rf"but the embedding has {PLAIN.vocab_size} rows"):
        fused.logits(ModelStep(torch.tensor([0, token_id]), positions, attention, torch.tensor([1])), tables.cache())
