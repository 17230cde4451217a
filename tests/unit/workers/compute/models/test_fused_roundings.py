"""What fused steps round activations to: within the roundings of quantized matrices, and which where."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Span, lay_out
from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import OUTLIER_ROWS, Level
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.models.fused import FusedLlama, load_for, make_model
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.models.model_step import ModelStep
from penstock.workers.compute.quant.packed import pack_all
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.fused_models import (
    BLOCK,
    MAX_LEN,
    PLAIN,
    QUANTIZED,
    Tables,
    logits_of,
    most_error,
    quantized_weights,
)
from tests.unit.workers.tiny_models import saved, tiny_model, written_as_gguf

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROWS = {
    1: [(0, 0, 1)],
    4: [(0, 1, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)],
    5: [(0, 2, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 0, 1)],
    9: [(0, 3, 6), (5, 0, 3)],
    33: [(0, 9, 20), (6, 0, 13)],
}
"""Steps one after the other, by their rows: one token for each of several sequences, then prompts; bfloat16 comes last,
because it stays in the cache."""


def logits_by_rows(model: Llama | FusedLlama) -> dict[int, Tensor]:
    """Logits of every row of the steps of ROWS."""
    tables = Tables(model.config)
    cache = tables.cache()
    return {count: logits_of(model, cache, tables, parts) for count, parts in ROWS.items()}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_matrices_give_what_their_dequantized_ones_give_within_their_rounding(
    name: str, level: Level, kernels: Library
) -> None:
    config = QUANTIZED[name]
    weights = quantized_weights(config)
    dense = {name: weight if isinstance(weight, Tensor) else weight.dequantize() for name, weight in weights.items()}
    packed = pack_all(weights.items(), kernels.matmul, torch.float32)
    expected = logits_by_rows(Llama(config, dense, MAX_LEN, 1, exact=False))

    for activations in Activations:
        by_one, by_three = (
            logits_by_rows(FusedLlama(config, packed, MAX_LEN, threads, kernels, activations)) for threads in (1, 3)
        )
        for rows in ROWS:
            assert torch.equal(by_one[rows], by_three[rows]), (activations, rows)
            error = float((by_one[rows] - expected[rows]).square().mean().sqrt() / expected[rows].std())
            assert error < most_error(activations, rows, level), (activations, rows)


SHORT = {
    "a short prompt": [(0, 0, 9)],
    "two of them": [(0, 0, 80), (1, 0, 80)],
    "one beside a long one": [(0, 0, 150), (1, 0, 9)],
    "one beside many that decode": [*((seq, 0, 1) for seq in range(6)), (6, 0, 9)],
}
MANY_OR_LONG = {
    "one too many that decode": [(seq, 0, 1) for seq in range(OUTLIER_ROWS + 1)],
    "with drafts": [(0, 0, 4), (1, 0, 4)],
    "a long prompt": [(0, 0, 130)],
}


def logits_of_ends(model: FusedLlama, parts: list[tuple[int, int, int]], *, is_every: bool) -> Tensor:
    """Logits of each sequence's last token, or of every token."""
    tables = Tables(model.config)
    token_ids, positions, attention = lay_out([tables.span(*part) for part in parts], BLOCK)
    rows = torch.arange(len(token_ids)) if is_every else attention.query_start[1:].long() - 1
    return model.logits(ModelStep(token_ids, positions, attention, rows), tables.cache())


def test_short_prompts_and_few_rows_take_outliers_and_others_one_term(level: Level, kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    one, two, mixed, by_three = (
        FusedLlama(PLAIN, packed, MAX_LEN, threads, kernels, kind)
        for kind, threads in (
            (Activations.ONE_TERM, 1),
            (Activations.TWO_TERMS, 1),
            (Activations.MIXED, 1),
            (Activations.MIXED, 3),
        )
    )

    few = {f"{count} rows": [(seq, 0, 1) for seq in range(count)] for count in (1, 2, OUTLIER_ROWS)}
    for name, parts in (few | SHORT).items():
        found, by_one, by_two = (logits_of_ends(model, parts, is_every=False) for model in (mixed, one, two))
        assert torch.equal(found, logits_of_ends(by_three, parts, is_every=False)), name
        if level < Level.VNNI:
            assert torch.equal(found, by_two), name
        else:  # of ordinary activations, which the tiny model has, outliers gain little
            assert 0 < (found - by_two).norm() < 0.95 * (by_one - by_two).norm(), name
            assert not torch.equal(found, by_one), name
    for name, parts in MANY_OR_LONG.items():
        found, by_one, by_two = (logits_of_ends(model, parts, is_every=True) for model in (mixed, one, two))
        assert torch.equal(found, by_one), name
        assert level < Level.AVX2 or not torch.equal(found, by_two), name


def test_a_draft_s_tokens_have_the_bits_that_they_have_one_by_one(level: Level, kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    model = FusedLlama(PLAIN, packed, MAX_LEN, 1, kernels, Activations.MIXED)
    tables = Tables(PLAIN)
    prompt, *single = (tables.span(0, *part) for part in ((0, 30), (30, 1), (31, 1), (32, 1), (33, 1)))
    caches = [tables.cache(), tables.cache()]

    def logits(cache: KvCache, span: Span) -> Tensor:
        token_ids, positions, attention = lay_out([span], BLOCK)
        return model.logits(ModelStep(token_ids, positions, attention, torch.arange(len(token_ids))), cache)

    for cache in caches:
        logits(cache, prompt)
    one_by_one = torch.cat([logits(caches[0], span) for span in single])

    draft = single[-1]._replace(token_ids=[span.token_ids[0] for span in single], start=30)
    assert torch.equal(logits(caches[1], draft), one_by_one)


def test_a_piece_of_a_prompt_is_none_that_is_short(kernels: Library) -> None:
    packed = pack_all(quantized_weights(PLAIN).items(), kernels.matmul, torch.float32)
    one, mixed = (
        FusedLlama(PLAIN, packed, MAX_LEN, 1, kernels, kind) for kind in (Activations.ONE_TERM, Activations.MIXED)
    )
    tables = Tables(PLAIN)
    token_ids, positions, attention = lay_out([tables.span(0, 0, 130), tables.span(1, 0, 9)], BLOCK)

    found, expected = (
        model.logits(ModelStep(token_ids, positions, attention, torch.arange(130)), tables.cache())
        for model in (mixed, one)
    )

    assert torch.equal(found, expected)


def test_a_quantized_file_is_served_by_fused_steps_with_the_activations_that_are_asked_for(
    level: Level, tmp_path: Path
) -> None:
    source = written_as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)

    def logits(activations: str, dtype: str = "bfloat16") -> Tensor:
        options = {"dtype": dtype, "threads": 1, "kv_memory_bytes": 2**20, "activations": activations}
        config = EngineConfig(**options)  # type: ignore[arg-type]
        runner = load_runner(source, config, poison=True)
        assert isinstance(runner._steps.model, FusedLlama) is (dtype == "bfloat16")
        seq = Sequence("r", [7], SamplingParams(max_tokens=4), 1, [], b"", 0.0, block_table=[3])
        return runner.forward(Step([Chunk(seq, 0, 1, 3, [91, 30, 7])], []))[1]

    expected, one, two = logits("auto", "float32"), logits("int8"), logits("int16")

    assert torch.equal(logits("auto"), two) is (level < Level.VNNI)
    assert level < Level.AVX2 or not torch.equal(one, two)
    for found in (one, two, logits("auto"), logits("bf16")):
        assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()


def test_where_matrices_have_no_packed_form_torch_serves_and_the_log_says_why(
    level: Level, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tiny_model("llama"), tmp_path)
    config = read_config(source)
    engine = EngineConfig(threads=1)

    with caplog.at_level("INFO", "penstock.fused"):
        weights = load_for(source, config, engine, torch.float32, torch.device("cpu"))

    assert isinstance(make_model(config, weights, 64, 1, engine), Llama)
    assert "not in the fused kernels: embed is dense in torch.float32" in caplog.text
