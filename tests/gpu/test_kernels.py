"""The Triton kernels against plain torch in float32, over random shapes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.attention import AttentionBatch
from penstock.workers.compute.triton.attention import decode, prefill
from penstock.workers.compute.triton.attention.attend import attend_planned
from penstock.workers.compute.triton.attention.decode import MAX_SPLITS, SPLIT_TOKENS, num_programs
from penstock.workers.compute.triton.attention.plan import FEW_TOKENS, PIECE_TOKENS
from penstock.workers.compute.triton.attention.prefill import TILINGS
from penstock.workers.compute.triton.attention.store import store
from tests.gpu.cases import (
    BLOCK_SIZES,
    DEVICE,
    GROUPS,
    HEAD_DIMS,
    IS_SHORT,
    NAN,
    TOLERANCE,
    Case,
    Shape,
    make_case,
    mixed_shape,
    planned,
    planned_by_rows,
    random_shape,
)

SEEDS = range(13 if IS_SHORT else 25 if DEVICE.type == "cpu" else 50)
"""The interpreter takes seconds for each; 13 are the fewest that meet the two tests of what they cover."""
NEW_TOKENS = 6
"""Most of one sequence, where each of them is a program for every head."""


def attended(case: Case, exact: bool = False) -> Tensor:
    """Attention of the case by the kernels; the result is on the host."""
    plan = planned(case.batch, case.k_cache.shape[2], exact).plan
    assert plan is not None
    return attend_planned(case.q.to(DEVICE), case.k_cache.to(DEVICE), case.v_cache.to(DEVICE), plan, case.scale).cpu()


def assert_as_expected(result: Tensor, case: Case, shape: Shape) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    assert result.dtype == case.q.dtype
    torch.testing.assert_close(
        result.float(), case.expected, atol=tolerance, rtol=tolerance, msg=lambda message: f"{shape}\n{message}"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_stored_keys_and_values_are_in_their_slots_and_nothing_else_changes(seed: int) -> None:
    shape = random_shape(seed, NEW_TOKENS)
    case = make_case(shape, seed)
    caches = [torch.full_like(case.k_cache, 7.0).to(DEVICE) for _ in range(2)]
    fused = torch.cat((case.k, torch.full_like(case.k, NAN), case.v), dim=1).to(DEVICE)
    heads, size = case.k.shape[1], case.k_cache.shape[2]

    store(fused[:, :heads], fused[:, 2 * heads :], caches[0], caches[1], case.batch.slot_mapping.to(DEVICE))

    slots = case.batch.slot_mapping
    for cache, x in zip(caches, (case.k, case.v), strict=True):
        expected = torch.full_like(case.k_cache, 7.0)
        expected[slots // size, :, slots % size] = x
        assert torch.equal(cache.cpu(), expected), shape


@pytest.mark.parametrize("seed", SEEDS)
def test_single_queries_get_what_textbook_attention_gives(seed: int) -> None:
    shape = random_shape(seed, 1)
    case = make_case(shape, seed)

    assert_as_expected(attended(case), case, shape)


def test_the_random_shapes_cover_what_kernels_get_wrong() -> None:
    shapes = [random_shape(seed, 1) for seed in SEEDS]
    contexts = [(context, shape.block_size) for shape in shapes for context, _ in shape.spans]

    assert {shape.dtype for shape in shapes} == set(TOLERANCE)
    assert {shape.group for shape in shapes} == set(GROUPS)
    assert {shape.num_kv_heads for shape in shapes} == {1, 2}
    assert {shape.head_dim for shape in shapes} == set(HEAD_DIMS)
    assert {shape.block_size for shape in shapes} == set(BLOCK_SIZES)
    assert min(contexts)[0] == 1
    assert sum(context > SPLIT_TOKENS for context, _ in contexts) > 1
    assert any(context % size == 0 for context, size in contexts), "a last block that is full"
    assert any(context % size for context, size in contexts)
    assert any(len(shape.spans) > 1 and shape.spans[-1][0] > SPLIT_TOKENS for shape in shapes), (
        "a short context beside one of several splits"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_rows_runs_and_pieces_of_one_step_get_what_textbook_attention_gives(seed: int) -> None:
    shape = mixed_shape(seed)
    case = make_case(shape, seed)
    plan = planned(case.batch, shape.block_size).plan

    assert plan is not None
    assert plan.rows is not None
    assert plan.runs is not None
    assert plan.pieces is not None
    assert_as_expected(attended(case), case, shape)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_sequences_are_found_by_their_rows_of_tables_that_others_have_rows_of_too(seed: int) -> None:
    shape = mixed_shape(seed)
    case = make_case(shape, seed)
    on_device = case.q.to(DEVICE), case.k_cache.to(DEVICE), case.v_cache.to(DEVICE)

    result = attend_planned(*on_device, planned_by_rows(case.batch), case.scale).cpu()

    assert_as_expected(result, case, shape)


def test_the_mixed_steps_cover_what_kernels_get_wrong() -> None:
    shapes = [mixed_shape(seed) for seed in SEEDS]
    spans = [span for shape in shapes for span in shape.spans]

    assert {shape.dtype for shape in shapes} == set(TOLERANCE)
    assert {shape.group for shape in shapes} == set(GROUPS)
    assert {shape.head_dim for shape in shapes} == set(HEAD_DIMS)
    assert {shape.block_size for shape in shapes} == set(BLOCK_SIZES)
    assert (1, 1) in spans
    assert any(context == new > PIECE_TOKENS for context, new in spans), "a whole prompt of several tiles"
    assert any(context > new > PIECE_TOKENS for context, new in spans), "a later piece of several tiles"
    assert any(1 < new <= FEW_TOKENS and context > SPLIT_TOKENS for context, new in spans), "a run over several parts"
    assert any(sum(new > FEW_TOKENS for _, new in shape.spans) > 1 for shape in shapes), "several pieces in a step"


def alone(case: Case, index: int) -> Case:
    """One sequence of the case, in the same cache."""
    batch = case.batch
    start, end = batch.query_start[index : index + 2].tolist()
    own = AttentionBatch(
        torch.tensor([0, end - start], dtype=torch.int32),
        batch.context_len[index : index + 1],
        batch.block_tables[index : index + 1],
        batch.slot_mapping[start:end],
    )
    return replace(case, q=case.q[start:end], batch=own, expected=case.expected[start:end])


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_sequence_gets_the_same_bits_alone_and_in_company(seed: int) -> None:
    shape = mixed_shape(seed)
    case = make_case(shape, seed)
    together = attended(case)
    starts = case.batch.query_start.tolist()

    for index in range(len(shape.spans)):
        assert torch.equal(attended(alone(case, index)), together[starts[index] : starts[index + 1]]), shape


@pytest.mark.parametrize("cuts", [(150,), (64, 86), (17, 100, 33), (1, 128, 21), (8, 8, 134)])
def test_however_a_prompt_is_cut_the_results_differ_by_rounding_only(cuts: tuple[int, ...]) -> None:
    """The last 150 of 170 tokens, in one step or in several."""
    shape = Shape(torch.float32, 64, 1, 4, 16, ((170, 150),))
    case = make_case(shape, 8)
    parts, end = [], 0
    for cut in cuts:
        start, end = end, end + cut
        batch = replace(
            case.batch,
            query_start=torch.tensor([0, cut], dtype=torch.int32),
            context_len=torch.tensor([20 + end], dtype=torch.int32),
        )
        parts.append(attended(replace(case, q=case.q[start:end], batch=batch)))

    assert end == 150
    torch.testing.assert_close(torch.cat(parts), attended(case), atol=5e-6, rtol=5e-6)


def test_of_a_run_over_two_parts_the_first_queries_may_see_nothing_of_the_second() -> None:
    shape = Shape(torch.float32, 64, 1, 3, 16, ((SPLIT_TOKENS + 3, FEW_TOKENS), (SPLIT_TOKENS + 1, 2)))
    case = make_case(shape, 9)

    assert_as_expected(attended(case), case, shape)


@pytest.mark.parametrize("tiling", sorted(set(TILINGS.values()) | {prefill.SMALLEST}))
def test_pieces_are_right_with_the_tiles_of_every_gpu(tiling: prefill.Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_tiling", lambda *_: tiling)
    shape = Shape(torch.float32, 16, 1, 3, 16, ((170, 140), (37, 37)))
    case = make_case(shape, 10)

    assert_as_expected(attended(case), case, shape)


def test_a_cache_in_another_type_than_the_queries_is_read() -> None:
    shape = Shape(torch.bfloat16, 64, 1, 3, 16, ((140, 1), (20, 3), (60, 40)))
    case = make_case(shape, 11)
    widened = replace(case, q=case.q.float())
    result = attended(widened)

    torch.testing.assert_close(result, case.expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("spans", [((700, 1), (40, 1)), ((700, 5), (40, 3))])
def test_parts_that_programs_share_give_the_same_bits(
    spans: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(Shape(torch.float32, 64, 1, 3, 16, spans), 12)
    apart = attended(case)
    monkeypatch.setattr(decode, "PROGRAMS", 4)

    assert num_programs(2, 6) == 2
    assert torch.equal(attended(case), apart)


def test_with_many_queries_no_program_is_started_for_a_part_that_is_not_there() -> None:
    assert num_programs(8, MAX_SPLITS) == MAX_SPLITS
    assert num_programs(decode.PROGRAMS, MAX_SPLITS) == 1
    assert num_programs(1, 1) == 1


@pytest.mark.parametrize("head_dim", [80, 200])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_dimensions_that_are_no_power_of_two(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(dtype, head_dim, 2, 5, 16, ((70, 1), (17, 2), (50, 20)))
    case = make_case(shape, 1)

    assert_as_expected(attended(case), case, shape)


def test_contexts_of_many_splits() -> None:
    contexts = (SPLIT_TOKENS - 1, SPLIT_TOKENS, SPLIT_TOKENS + 1, 5 * SPLIT_TOKENS + 3, MAX_SPLITS * SPLIT_TOKENS + 70)
    shape = Shape(torch.float32, 64, 1, 3, 16, tuple((context, 1) for context in contexts))
    case = make_case(shape, 2)

    assert_as_expected(attended(case), case, shape)


def test_large_scores_do_not_overflow() -> None:
    case = make_case(Shape(torch.float32, 64, 1, 2, 16, ((290, 1), (40, 3), (60, 20))), 3)
    larger = Case(300 * case.q, case.k, case.v, case.k_cache, case.v_cache, case.batch, case.expected, case.scale)

    assert attended(larger).isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_row_by_row_a_query_gets_the_same_bits_alone_in_any_batch_and_however_its_chunk_is_cut(
    dtype: torch.dtype,
) -> None:
    spans = ((270, 4), (33, 1), (10, 10))
    together = attended(make_case(Shape(dtype, 64, 1, 2, 16, spans), 4), exact=True)

    first = make_case(Shape(dtype, 64, 1, 2, 16, ((270, 2),)), 4)
    assert torch.equal(attended(first, exact=True), together[4 - 2 : 4])


def test_a_read_of_a_foreign_slot_would_show() -> None:
    case = make_case(Shape(torch.float32, 64, 1, 2, 16, ((40, 1), (60, 20))), 5)
    case.k_cache[case.batch.block_tables[0, 0]] = NAN
    case.v_cache[case.batch.block_tables[1, 0]] = NAN

    assert attended(case).flatten(1).isnan().any(dim=1).all()
