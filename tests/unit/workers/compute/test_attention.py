import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.base.native import find_compilers
from penstock.workers.compute import attention
from penstock.workers.compute.attention import AttentionBatch, attend, write_kv
from penstock.workers.compute.kernels.build import obtain
from penstock.workers.compute.kernels.cache_layout import PLAIN, CacheLayout
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level, MatmulKernels
from tests.unit.workers.built_kernels import built_kernels

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Span = tuple[int, int]
"""(context_len, new tokens) of one sequence."""


@dataclass
class Case:
    """Sequences in a paged cache whose every other slot is NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]
    layout: CacheLayout = PLAIN

    def attend(self, threads: int = 2, exact: bool = False) -> Tensor:
        return attend(self.q, self.k_cache, self.v_cache, self.batch, 0.25, threads, exact, self.layout)

    def torch_attend(self, exact: bool) -> Tensor:
        return attention._attend_torch(self.q, self.k_cache, self.v_cache, self.batch, 0.25, exact, self.layout)


def make_case(
    spans: list[Span],
    *,
    dim: int = 64,
    kv_heads: int = 3,
    group: int = 3,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    cache: str = "plain",
) -> Case:
    """Random content that depends on `seed` and the sequence's index alone."""
    counts = [-(-context // block_size) for context, _ in spans]
    blocks = list(range(1, sum(counts) + 4))
    random.Random(seed).shuffle(blocks)
    shape = (len(blocks) + 1, kv_heads, block_size, dim)
    is_int8, is_tiled = "int8" in cache, "tiled" in cache
    layout = CacheLayout((torch.full(shape[:3], NAN), torch.full(shape[:3], NAN)) if is_int8 else None, is_tiled)
    k_cache = torch.full(shape, 99 if is_int8 else NAN, dtype=torch.int8 if is_int8 else dtype)
    v_cache = k_cache.clone()
    tables = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    keys, values, queries, slots = [], [], [], []
    for index, (context, new) in enumerate(spans):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        k, v, q = (
            torch.randn(context, heads, dim, generator=generator).to(dtype)
            for heads in (kv_heads, kv_heads, kv_heads * group)
        )
        table = torch.tensor([blocks.pop() for _ in range(counts[index])])
        tables[index, : counts[index]] = table
        positions = torch.arange(context)
        slot = table[positions // block_size] * block_size + positions % block_size
        write_kv(k, v, k_cache, v_cache, slot, layout)
        keys.append(k)
        values.append(v)
        queries.append(q[context - new :])
        slots.append(slot[context - new :])
    starts = torch.tensor([0, *(new for _, new in spans)]).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in spans], dtype=torch.int32)
    return Case(
        torch.cat(queries),
        k_cache,
        v_cache,
        AttentionBatch(starts, contexts, tables, torch.cat(slots)),
        keys,
        values,
        layout,
    )


def dense(case: Case) -> Tensor:
    """Softmax attention of textbooks, in float64, query by query."""
    out = []
    starts, contexts = case.batch.query_start.tolist(), case.batch.context_len.tolist()
    for index, context in enumerate(contexts):
        for row in range(starts[index], starts[index + 1]):
            visible = context - (starts[index + 1] - 1 - row)
            group = case.q.shape[1] // case.k_cache.shape[1]
            keys, values = (
                x[index][:visible].double().repeat_interleave(group, dim=1) for x in (case.keys, case.values)
            )
            weights = torch.softmax(0.25 * torch.einsum("hd,jhd->hj", case.q[row].double(), keys), dim=1)
            out.append(torch.einsum("hj,jhd->hd", weights, values))
    return torch.stack(out)


MIXED: list[Span] = [(1, 1), (7, 7), (16, 1), (17, 1), (70, 1), (64, 64), (65, 20), (129, 33), (200, 3)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[Library]:
    """One thread of torch, which is only the oracle here, and whose threads wait for each other on a busy
    machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield built_kernels()
    torch.set_num_threads(before)


@pytest.fixture
def matmul(kernels: Library) -> Iterator[MatmulKernels]:
    """The kernels' matmul, whose level a test may set."""
    yield kernels.matmul
    kernels.matmul.set_level(None)


@pytest.mark.parametrize(
    ("dim", "group", "block_size", "dtype"), list(product((16, 32, 64, 128), (1, 3, 4, 8), (8, 16, 32), TOLERANCE))
)
def test_the_kernel_equals_dense_softmax_attention(dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, dim=dim, kv_heads=2, group=group, block_size=block_size, dtype=dtype)

    torch.testing.assert_close(case.attend().double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("cache", ["plain", "tiled"])
def test_products_of_bfloat16_pairs_by_shifts_are_those_of_the_processor(cache: str, matmul: MatmulKernels) -> None:
    case = make_case([*MIXED, (300, 1)], dim=64, kv_heads=2, group=3, dtype=torch.bfloat16, cache=cache)
    by_processor = case.attend()
    if matmul.level() < Level.AVX512 or not matmul.set_level(Level.VNNI):
        pytest.skip("this CPU does not have AVX512-BF16")

    torch.testing.assert_close(case.attend().float(), by_processor.float(), atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize(
    ("exact", "group", "block_size", "dtype"), list(product((False, True), (1, 4), (8, 16), TOLERANCE))
)
def test_the_torch_fallback_equals_dense_softmax_attention(
    exact: bool, group: int, block_size: int, dtype: torch.dtype
) -> None:
    case = make_case(MIXED, dim=32, group=group, block_size=block_size, dtype=dtype)

    torch.testing.assert_close(
        case.torch_attend(exact).double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("level", "dim", "group", "cache"),
    list(
        product(
            (None, Level.VNNI, Level.AVX2, Level.PORTABLE),
            (32, 64, 96, 128),
            (1, 3, 8),
            ("tiled", "int8", "tiled int8"),
        )
    ),
)
def test_tiled_and_int8_caches_equal_dense_softmax_attention(
    level: Level | None, dim: int, group: int, cache: str, matmul: MatmulKernels
) -> None:
    if not matmul.set_level(level):
        pytest.skip("this CPU does not have these instructions")
    dtype = torch.bfloat16 if cache == "tiled" else torch.float32
    case = make_case([*MIXED, (300, 1), (600, 40)], dim=dim, kv_heads=2, group=group, dtype=dtype, cache=cache)

    expected = dense(case)
    assert (case.attend() - expected).square().mean().sqrt() < 0.02 * expected.std()


def test_torch_and_the_kernels_keep_and_read_an_int8_cache_alike(matmul: MatmulKernels) -> None:
    case = make_case(MIXED, cache="int8")
    layout = (
        CacheLayout((torch.full_like(case.layout.scales[0], NAN), torch.full_like(case.layout.scales[1], NAN)))
        if case.layout.scales
        else PLAIN
    )
    caches = (torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache))

    assert matmul.set_level(Level.PORTABLE)
    torch.testing.assert_close(case.torch_attend(False), case.attend(), atol=2e-5, rtol=2e-5)
    new = torch.cat([keys[-1:] for keys in case.keys]), torch.cat([values[-1:] for values in case.values])
    slots = case.batch.slot_mapping[case.batch.query_start[1:].long() - 1]
    attention._write_kv_torch(*new, *caches, slots, layout)
    for place in slots.tolist():
        block, offset = divmod(place, 16)
        assert torch.equal(caches[0][block, :, offset], case.k_cache[block, :, offset])
        assert layout.scales is not None
        assert case.layout.scales is not None
        torch.testing.assert_close(layout.scales[1][block, :, offset], case.layout.scales[1][block, :, offset])


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_smaller_than_a_vector_give_the_same_bits_as_large_ones(block_size: int) -> None:
    small, large = (make_case(MIXED, block_size=size) for size in (block_size, 32))

    assert torch.equal(small.attend(), large.attend())


def test_contexts_of_several_segments_equal_dense_softmax_attention() -> None:
    case = make_case([(2500, 2), (1024, 1), (1025, 1), (3000, 40)], kv_heads=2, group=2)

    torch.testing.assert_close(case.attend().double(), dense(case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "threads", "cache"),
    [
        *product(TOLERANCE, (1, 2, 5), ("plain",)),
        (torch.bfloat16, 2, "tiled"),
        (torch.float32, 2, "int8"),
        (torch.float32, 2, "tiled int8"),
    ],
)
def test_a_query_gets_the_same_bits_alone_and_in_any_batch_with_any_number_of_threads(
    dtype: torch.dtype, threads: int, cache: str
) -> None:
    spans = [*MIXED, (1100, 30), (2100, 1)]
    together = make_case(spans, dtype=dtype, cache=cache)
    whole = together.attend(threads)

    for index, (context, new) in enumerate(spans):
        expected = whole[together.batch.query_start[index] : together.batch.query_start[index + 1]]
        for row in {0, new // 2, new - 1}:
            alone = narrowed(together, index, row, context - new + row + 1)
            assert torch.equal(alone.attend(1)[0], expected[row])


def narrowed(case: Case, index: int, row: int, visible: int) -> Case:
    """One query of a case as a batch of its own; everything behind its context is made NaN."""
    token = int(case.batch.query_start[index]) + row
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    layout = (
        case.layout
        if case.layout.scales is None
        else CacheLayout((case.layout.scales[0].clone(), case.layout.scales[1].clone()), case.layout.is_tiled)
    )
    table, size = case.batch.block_tables[index], case.k_cache.shape[2]
    for cache in layout.scales or (k_cache, v_cache):
        cache[table[-(-visible // size) :].long()] = NAN
        if visible % size and (layout.scales is not None or not layout.is_tiled):
            cache[int(table[visible // size]), :, visible % size :] = NAN
    tables = case.batch.block_tables[index : index + 1, : -(-visible // size)].clone()
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([visible], dtype=torch.int32),
        tables,
        torch.zeros(1, dtype=torch.int64),
    )
    return Case(case.q[token : token + 1], k_cache, v_cache, batch, [], [], layout)


@settings(max_examples=30, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 80)).map(lambda pair: (max(pair), min(pair))),
        min_size=1,
        max_size=6,
    ),
    dim=st.sampled_from((16, 48, 80, 96, 192, 256)),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 5, 7, 40)),
    block_size=st.sampled_from((8, 16, 32)),
    seed=st.integers(0, 2**16),
)
def test_the_kernel_equals_dense_attention_for_odd_shapes(
    spans: list[Span], dim: int, kv_heads: int, group: int, block_size: int, seed: int
) -> None:
    spans = [(context, min(new, 12)) for context, new in spans]
    case = make_case(spans, dim=dim, kv_heads=kv_heads, group=group, block_size=block_size, seed=seed)

    torch.testing.assert_close(case.attend().double(), dense(case), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("level", [None, Level.VNNI, Level.AVX2])
@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 5)).map(lambda pair: (max(pair), min(pair))),
        min_size=1,
        max_size=3,
    ),
    cache=st.sampled_from(("plain", "tiled", "int8", "tiled int8")),
    dim=st.sampled_from((32, 64, 96, 128, 192, 256)),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 64),
    block_size=st.sampled_from((16, 32)),
    seed=st.integers(0, 2**16),
)
def test_bfloat16_and_int8_caches_equal_dense_attention_for_any_heads(
    kernels: Library,
    level: Level | None,
    spans: list[Span],
    cache: str,
    dim: int,
    kv_heads: int,
    group: int,
    block_size: int,
    seed: int,
) -> None:
    if not kernels.matmul.set_level(level):
        pytest.skip("this CPU does not have these instructions")
    try:
        dtype = torch.float32 if "int8" in cache else torch.bfloat16
        case = make_case(
            spans, dim=dim, kv_heads=kv_heads, group=group, block_size=block_size, dtype=dtype, seed=seed, cache=cache
        )
        found = case.attend()
    finally:
        kernels.matmul.set_level(None)

    expected = dense(case)
    assert (found - expected).square().mean().sqrt() < 0.04 * expected.std()


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    cases = [make_case([(600 + index, 40), (90, 1)], seed=index) for index in range(3)]
    expected = [case.attend(1) for case in cases]
    with ThreadPoolExecutor(3) as executor:
        for _ in range(10):
            results = list(executor.map(Case.attend, cases))
            assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected, strict=True))


def test_exact_torch_attention_of_a_query_does_not_depend_on_its_batch() -> None:
    together = make_case(MIXED, dim=32)
    whole = together.torch_attend(exact=True)

    for index, (context, new) in enumerate(MIXED):
        expected = whole[together.batch.query_start[index] : together.batch.query_start[index + 1]]
        for row in {0, new // 2, new - 1}:
            alone = narrowed(together, index, row, context - new + row + 1)
            assert torch.equal(alone.torch_attend(exact=True)[0], expected[row])


def test_a_head_dim_that_the_kernel_lacks_falls_back_to_torch() -> None:
    case = make_case(MIXED, dim=24)

    torch.testing.assert_close(case.attend().double(), dense(case), atol=2e-5, rtol=2e-5)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(50, 1), (80, 80)])
    case.q *= 300

    torch.testing.assert_close(case.attend().double(), dense(case), atol=1e-3, rtol=1e-3)


def test_queries_may_be_a_slice_of_a_fused_projection() -> None:
    case = make_case(MIXED)
    expected = case.attend()
    tokens, heads, dim = case.q.shape
    fused = torch.full((tokens, heads * dim + 100), NAN)
    fused[:, : heads * dim] = case.q.view(tokens, -1)
    case.q = fused[:, : heads * dim].view(tokens, heads, dim)

    assert not case.q.is_contiguous()
    assert torch.equal(case.attend(), expected)


def test_bfloat16_queries_may_read_a_float32_cache_and_the_reverse() -> None:
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        case = make_case(MIXED, dtype=dtype)
        case.q = case.q.to(other)

        assert case.attend().dtype == other
        torch.testing.assert_close(case.attend().double(), dense(case), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("source", "target"), list(product(TOLERANCE, TOLERANCE)))
def test_write_kv_stores_what_torch_would_and_nothing_else(source: torch.dtype, target: torch.dtype) -> None:
    fused = torch.randn(9, 2 * 3 * 32).to(source)
    fused[0, :4] = torch.tensor([NAN, float("inf"), float("-inf"), 3.4e38]).to(source)
    k, v = (half.view(9, 3, 32) for half in fused.split(96, dim=1))
    slots = torch.randperm(5 * 8)[:9]
    caches = [torch.full((5, 3, 8, 32), 7.0, dtype=target) for _ in range(4)]

    write_kv(k, v, caches[0], caches[1], slots)
    attention._write_kv_torch(k, v, caches[2], caches[3], slots)

    for got, expected in ((caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.slow
def test_every_other_compiler_of_this_machine_builds_kernels_that_agree(tmp_path: Path) -> None:
    """The first one's are what all tests run on."""
    others = find_compilers()[1:]
    if not others:
        pytest.skip("there is one C++ compiler at most")
    case = make_case(MIXED)
    batch = case.batch
    for compiler in others:
        kernels = obtain([compiler], tmp_path)
        out = kernels.attend(
            case.q, case.k_cache, case.v_cache, batch.query_start, batch.context_len, batch.block_tables, 0.25, 2
        )

        torch.testing.assert_close(out.double(), dense(case), atol=2e-5, rtol=2e-5)
