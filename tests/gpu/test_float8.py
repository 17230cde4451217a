"""A cache in float8 e4m3 with a scale for each token's head: what is stored is what torch rounds to, and attention
reads it."""

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.triton.attention.attend import attend_planned
from penstock.workers.compute.triton.attention.decode import SPLIT_TOKENS
from penstock.workers.compute.triton.attention.store import LARGEST, store
from tests.gpu.cases import DEVICE, NAN, Case, Shape, make_case, planned, textbook

FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 0.1
"""Error that is tolerated, of numbers around 1 that are rounded to 4 significant bits."""


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin: values in float8, scales."""
    unit = x.float().abs().amax(-1) * (1 / LARGEST)
    return (x.float() / unit.where(unit > 0, 1.0)[..., None]).to(FLOAT8), unit


def empty_cache(case: Case) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Full of NaN."""
    caches = [torch.full(case.k_cache.shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(FLOAT8) for _ in range(2)]
    return caches, (
        torch.full(case.k_cache.shape[:3], NAN, device=DEVICE),
        torch.full(case.k_cache.shape[:3], NAN, device=DEVICE),
    )


@pytest.mark.parametrize("seed", range(6))
def test_stored_numbers_are_those_that_torch_rounds_to(seed: int) -> None:
    case = make_case(Shape(DTYPES[seed % 2], (64, 80, 128)[seed % 3], 2, 1, 16, ((20, 6), (4, 4))), seed)
    case.k[0], case.v[1, 1] = 0.0, 1e-3 * case.v[1, 1]
    case.k[2, 0, ::2] *= 1e-4
    caches, scales = empty_cache(case)

    store(case.k.to(DEVICE), case.v.to(DEVICE), caches[0], caches[1], case.batch.slot_mapping.to(DEVICE), scales)

    slots = case.batch.slot_mapping
    for cache, scale, x in zip(caches, scales, (case.k, case.v), strict=True):
        values, units = rounded(x)
        size = cache.shape[2]
        found = cache.cpu().view(torch.uint8)
        assert torch.equal(found[slots // size, :, slots % size], values.view(torch.uint8))
        assert torch.equal(scale.cpu()[slots // size, :, slots % size], units)
        assert int((found != 0x7F).any(-1).sum()) == len(slots) * 2, "nothing else changes"


def test_a_slot_below_zero_is_nowhere() -> None:
    case = make_case(Shape(torch.float32, 64, 1, 1, 16, ((3, 3),)), 1)
    caches, scales = empty_cache(case)

    store(case.k.to(DEVICE), case.v.to(DEVICE), caches[0], caches[1], torch.full((3,), -1, device=DEVICE), scales)

    assert all((cache.view(torch.uint8) == 0x7F).all() for cache in caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (96, 8), (128, 32)])
def test_attention_reads_what_was_rounded(dtype: torch.dtype, exact: bool, head_dim: int, block_size: int) -> None:
    spans = ((40, 1), (23, 12), (SPLIT_TOKENS + 9, 1), (SPLIT_TOKENS + 20, 30))
    shape = Shape(dtype, head_dim, 2, 3, block_size, spans)
    case = make_case(shape, 2)
    caches, scales = empty_cache(case)
    for cache, scale, full in zip(caches, scales, (case.k_cache, case.v_cache), strict=True):
        values, units = rounded(full.nan_to_num())
        is_written = ~full.isnan().any(-1)
        cache.view(torch.uint8)[is_written] = values.view(torch.uint8)[is_written].to(DEVICE)
        scale[is_written] = units[is_written].to(DEVICE)

    plan = planned(case.batch, block_size, exact).plan
    assert plan is not None
    result = attend_planned(case.q.to(DEVICE), caches[0], caches[1], plan, case.scale, scales).cpu()

    keys, values = (cache.cpu().float() * scale.cpu()[..., None] for cache, scale in zip(caches, scales, strict=True))
    torch.testing.assert_close(
        result.float(), over_blocks(case, keys, values), atol=2e-2 if dtype == torch.bfloat16 else 2e-5, rtol=1e-2
    )
    torch.testing.assert_close(result.float(), case.expected, atol=TOLERANCE, rtol=TOLERANCE)


def over_blocks(case: Case, keys: Tensor, values: Tensor) -> Tensor:
    """Textbook attention over what the blocks hold."""
    rows = []
    starts = case.batch.query_start.tolist()
    for owner, (start, end, context) in enumerate(
        zip(starts[:-1], starts[1:], case.batch.context_len.tolist(), strict=True)
    ):
        k, v = (cache[case.batch.block_tables[owner].long()].transpose(1, 2).flatten(0, 1) for cache in (keys, values))
        for row in range(start, end):
            visible = context - (end - row) + 1
            rows.append(textbook(case.q[row], k[:visible], v[:visible], case.scale))
    return torch.stack(rows)
