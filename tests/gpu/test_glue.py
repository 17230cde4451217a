"""What a layer computes between its matrix products, by the kernels, against torch's operators on the host. Results are
equal bit by bit, but where squares are added or an exponential is taken: there hardly any differs, by a last place."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.models.operators import gated, rms_norm, rotate
from penstock.workers.compute.models.rope import rope_tables
from penstock.workers.compute.triton import glue
from tests.gpu.cases import DEVICE
from tests.gpu.test_float8 import FLOAT8, rounded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
MOST_DIFFERENT = 0.005
"""Share of numbers in 16 bits that may be rounded to the next one, because their last place in float32 differs."""
HEAD_DIMS = (16, 64, 80, 96, 128, 256)
HEADS = ((1, 1), (9, 3), (4, 2), (7, 1), (20, 4))
"""Heads of queries, and of keys and values."""
BLOCK_SIZE, NUM_BLOCKS, LENGTH = 8, 4, 50
NOWHERE = 7.0
"""What stands in slots that nothing is written to."""
SEEDS = range(30)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_almost_equal(result: Tensor, expected: Tensor) -> None:
    """The same numbers, but for last places."""
    result = result.cpu()
    assert result.dtype == expected.dtype
    place = 16 * torch.finfo(torch.float32).eps if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
    torch.testing.assert_close(result, expected, rtol=place, atol=place * float(expected.abs().max()))
    if result.dtype != torch.float32:
        assert int((result != expected).sum()) <= max(1, MOST_DIFFERENT * result.numel())


@pytest.mark.parametrize("columns", [16, 72, 576, 1030, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_adds_and_norms(dtype: torch.dtype, columns: int) -> None:
    x, added = (drawn(seed, 3, columns, dtype=dtype) for seed in (1, 2))
    x[1] *= 1e-3
    weight = 1 + drawn(3, columns, dtype=dtype) / 4
    ours = x.clone().to(DEVICE)

    result = glue.add_norm(ours, added.to(DEVICE), weight.to(DEVICE), EPS)

    assert torch.equal(ours.cpu(), x + added)
    assert_almost_equal(result, rms_norm(x + added, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_alone_leaves_what_it_norms(dtype: torch.dtype) -> None:
    x, weight = drawn(1, 3, 576, dtype=dtype), drawn(2, 576, dtype=dtype)
    ours = x.clone().to(DEVICE)

    result = glue.norm(ours, weight.to(DEVICE), EPS)

    assert torch.equal(ours.cpu(), x)
    assert_almost_equal(result, rms_norm(x, weight, EPS))


def test_a_row_of_zeros_is_normed_to_zeros() -> None:
    assert not glue.norm(torch.zeros(2, 64, device=DEVICE), torch.ones(64, device=DEVICE), EPS).any()


@pytest.mark.parametrize("columns", [8, 1100, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_opens_the_gate(dtype: torch.dtype, columns: int) -> None:
    gate_up = 4 * drawn(1, 3, 2 * columns, dtype=dtype)
    gate_up[0, :4] = torch.tensor([0.0, -80.0, 80.0, 1e-3])

    assert_almost_equal(glue.gate(gate_up.to(DEVICE), dtype), gated(gate_up))


@pytest.mark.parametrize("num_parts", [1, 8, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_adds_parts_up_in_order_and_rounds_their_sum(dtype: torch.dtype, num_parts: int) -> None:
    parts = 2 * drawn(1, num_parts, 3, 2 * 1100, dtype=torch.float32)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part

    result = glue.gate(parts.to(DEVICE), dtype)

    assert torch.equal(result, glue.gate(total.to(dtype).to(DEVICE), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    x, added, weight = (drawn(1, 5, 200, dtype=dtype), drawn(2, 5, 200, dtype=dtype), drawn(3, 200, dtype=dtype))
    x, added, weight = x.to(DEVICE), added.to(DEVICE), weight.to(DEVICE)
    opened, normed = glue.gate(x, x.dtype), glue.add_norm(x.clone(), added, weight, EPS)

    for row in range(len(x)):
        alone = slice(row, row + 1)
        assert torch.equal(glue.gate(x[alone], x.dtype), opened[alone])
        assert torch.equal(glue.add_norm(x[alone].clone(), added[alone], weight, EPS), normed[alone])


class Heads(NamedTuple):
    """Products qkv of some tokens, and what is to be done with them; on the host."""

    qkv: Tensor
    num_heads: int
    num_kv_heads: int
    norms: tuple[Tensor, Tensor] | None
    rope: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        return NUM_BLOCKS, self.num_kv_heads, BLOCK_SIZE, self.qkv.shape[2]

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values, by torch's operators."""
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = self.qkv[:, :num_rotated], self.qkv[:, num_rotated:]
        if self.norms is not None:
            parts = (qk[:, : self.num_heads], qk[:, self.num_heads :])
            qk = torch.cat([rms_norm(part, norm, EPS) for part, norm in zip(parts, self.norms, strict=True)], dim=1)
        qk = rotate(qk, *(table[self.positions] for table in self.rope))
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v

    def placed(
        self, caches: list[Tensor], scales: tuple[Tensor, Tensor] | None = None, parts: Tensor | None = None
    ) -> Tensor:
        """Queries of the kernel, which writes keys and values to the caches on DEVICE. parts: what makes qkv up."""
        norms = None if self.norms is None else (self.norms[0].to(DEVICE), self.norms[1].to(DEVICE))
        cos, sin = (table.to(DEVICE) for table in self.rope)
        positions, slots = self.positions.to(DEVICE), self.slots.to(DEVICE)
        qkv = (self.qkv if parts is None else parts).to(DEVICE)
        return glue.rotate_and_store(
            qkv, norms, EPS, (cos, sin), positions, slots, caches[0], caches[1], self.qkv.dtype, scales
        ).cpu()

    def alone(self, token: int) -> "Heads":
        own = slice(token, token + 1)
        return self._replace(qkv=self.qkv[own], positions=self.positions[own], slots=self.slots[own])


def make_heads(seed: int) -> Heads:
    """Six tokens, of which the third is written nowhere. The dtype goes round with the seed, every second one has
    norms; sizes and places are drawn."""
    draw = random.Random(seed)
    dtype, head_dim = DTYPES[seed % 3], draw.choice(HEAD_DIMS)
    num_heads, num_kv_heads = draw.choice(HEADS)
    norms = (1 + drawn(seed, head_dim, dtype=dtype) / 4, 1 + drawn(seed + 100, head_dim, dtype=dtype) / 4)
    slots = torch.tensor(draw.sample(range(NUM_BLOCKS * BLOCK_SIZE), 6))
    slots[2] = -1
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return Heads(
        drawn(seed, 6, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype), num_heads, num_kv_heads,
        norms if seed % 2 else None, rope_tables(inverse, LENGTH),
        torch.tensor([draw.randrange(LENGTH) for _ in range(6)]), slots,
    )  # fmt: skip


def test_the_drawn_heads_cover_what_kernels_get_wrong() -> None:
    made = [make_heads(seed) for seed in SEEDS]

    assert {heads.qkv.shape[2] for heads in made} == set(HEAD_DIMS)
    assert {(heads.num_heads, heads.num_kv_heads) for heads in made} == set(HEADS)
    assert {(heads.qkv.dtype, heads.norms is None) for heads in made} == {
        (dtype, is_plain) for dtype in DTYPES for is_plain in (True, False)
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_queries_are_rotated_and_keys_and_values_are_in_their_slots_and_nothing_else_changes(seed: int) -> None:
    heads = make_heads(seed)
    q, k, v = heads.expected()
    caches = [torch.full(heads.cache_shape, NOWHERE, dtype=q.dtype, device=DEVICE) for _ in range(2)]

    queries = heads.placed(caches)

    is_equal = torch.testing.assert_close if heads.norms is None else assert_almost_equal
    exactly = {"rtol": 0, "atol": 0} if heads.norms is None else {}
    is_equal(queries, q, **exactly)
    written = heads.slots >= 0
    blocks, offsets = heads.slots[written] // BLOCK_SIZE, heads.slots[written] % BLOCK_SIZE
    for cache, x in zip(caches, (k, v), strict=True):
        expected = torch.full(heads.cache_shape, NOWHERE, dtype=q.dtype)
        expected[blocks, :, offsets] = x[written]
        is_equal(cache.cpu(), expected, **exactly)
        assert torch.equal(cache.cpu() == NOWHERE, expected == NOWHERE)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_cache_of_8_bits_gets_the_numbers_that_torch_rounds_to(seed: int) -> None:
    heads = make_heads(seed)._replace(norms=None)
    heads.qkv[0], heads.qkv[1, :, ::2] = 0.0, 1e-3 * heads.qkv[1, :, ::2]
    q, *kv = heads.expected()
    caches = [torch.full(heads.cache_shape, 0x7F, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = torch.full((2, *heads.cache_shape[:3]), NOWHERE, device=DEVICE)

    queries = heads.placed([cache.view(FLOAT8) for cache in caches], (scales[0], scales[1]))

    assert torch.equal(queries, q)
    written = heads.slots >= 0
    blocks, offsets = heads.slots[written] // BLOCK_SIZE, heads.slots[written] % BLOCK_SIZE
    for cache, scale, x in zip(caches, scales, kv, strict=True):
        values, units = rounded(x[written])
        assert torch.equal(cache.cpu()[blocks, :, offsets], values.view(torch.uint8))
        assert torch.equal(scale.cpu()[blocks, :, offsets], units)
        count = int(written.sum()) * heads.num_kv_heads
        assert int((cache != 0x7F).any(-1).sum()) == int((scale != NOWHERE).sum()) == count, "nothing else changes"


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_token_leaves_the_same_queries_keys_and_values_alone_and_in_company(seed: int) -> None:
    heads = make_heads(seed)
    caches, own = (
        [torch.full(heads.cache_shape, NOWHERE, dtype=heads.qkv.dtype, device=DEVICE) for _ in range(2)]
        for _ in range(2)
    )
    together = heads.placed(caches)

    alone = [heads.alone(token).placed(own) for token in range(len(heads.qkv))]

    assert torch.equal(torch.cat(alone), together)
    assert all(torch.equal(one, other) for one, other in zip(own, caches, strict=True))


def test_a_cache_in_another_type_gets_rounded_numbers() -> None:
    heads = make_heads(0)
    _, k, v = heads.expected()
    caches = [torch.full(heads.cache_shape, NOWHERE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]

    heads.placed(caches)

    assert k.dtype == torch.float32
    for cache, x in zip(caches, (k, v), strict=True):
        slot = int(heads.slots[0])
        assert torch.equal(cache.cpu()[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE], x[0].bfloat16())


def drawn_parts(num_parts: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Parts of a product and the product itself, as `matmul.multiply` adds them up."""
    parts = drawn(num_parts, num_parts, *shape)
    total = torch.zeros(*shape)
    for part in parts:
        total += part
    return parts, total.to(dtype)


@pytest.mark.parametrize("num_parts", [2, 8, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_product_give_what_their_sum_gives(dtype: torch.dtype, num_parts: int) -> None:
    parts, added = drawn_parts(num_parts, (3, 200), dtype)
    x, weight = drawn(1, 3, 200, dtype=dtype).to(DEVICE), drawn(2, 200, dtype=dtype).to(DEVICE)
    other = x.clone()

    assert torch.equal(
        glue.add_norm(x, parts.to(DEVICE), weight, EPS), glue.add_norm(other, added.to(DEVICE), weight, EPS)
    )
    assert torch.equal(x, other)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_parts_of_heads_give_what_their_sum_gives(seed: int) -> None:
    drawn_heads = make_heads(seed)
    parts, qkv = drawn_parts(seed + 2, drawn_heads.qkv.shape, drawn_heads.qkv.dtype)
    heads = drawn_heads._replace(qkv=qkv)
    caches, other = (
        [torch.full(heads.cache_shape, NOWHERE, dtype=qkv.dtype, device=DEVICE) for _ in range(2)] for _ in range(2)
    )

    assert torch.equal(heads.placed(caches, parts=parts), heads.placed(other))
    assert all(torch.equal(one, another) for one, another in zip(caches, other, strict=True))


def test_of_no_tokens_nothing_is_launched() -> None:
    heads = make_heads(0)
    empty = heads._replace(qkv=heads.qkv[:0], positions=heads.positions[:0], slots=heads.slots[:0])

    assert len(empty.placed([torch.zeros(heads.cache_shape, device=DEVICE)] * 2)) == 0
    assert glue.gate(torch.zeros(0, 8, device=DEVICE), torch.float32).shape == (0, 4)
    assert glue.norm(torch.zeros(0, 8, device=DEVICE), torch.ones(8, device=DEVICE), EPS).shape == (0, 8)
