import pytest
import torch

from penstock.workers.compute.kernels.arena import ALIGNMENT, CHUNK_BYTES, Arena


def test_cuts_are_zeros_aligned_and_apart() -> None:
    arena = Arena()
    cuts = [arena.cut(size) for size in (1, 64, 1000, 65)]

    assert [len(cut) for cut in cuts] == [1, 64, 1000, 65]
    assert not any(cut.any() for cut in cuts)
    assert all(cut.data_ptr() % ALIGNMENT == 0 for cut in cuts)
    for number, cut in enumerate(cuts):
        cut.fill_(number)
    assert all(bool(cut.eq(number).all()) for number, cut in enumerate(cuts))


@pytest.mark.parametrize("size", [CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_cut_may_be_as_large_as_a_chunk_or_larger(size: int) -> None:
    arena = Arena()
    before, large, after = arena.cut(10), arena.cut(size), arena.cut(10)

    large[-1] = 7
    assert (len(before), len(large), len(after)) == (10, size, 10)
    assert not after.any()


def test_a_cut_outlives_its_arena() -> None:
    cut = Arena().cut(1 << 16)
    cut.fill_(5)
    torch.ones(1 << 20)

    assert bool(cut.eq(5).all())


def test_what_is_left_of_a_chunk_is_cut_before_the_next_one_is() -> None:
    arena = Arena()
    first = arena.cut(CHUNK_BYTES - 4096)
    large = arena.cut(8192)
    small = arena.cut(64)

    assert small.data_ptr() == first.data_ptr() + CHUNK_BYTES - 4096
    assert not 0 <= large.data_ptr() - first.data_ptr() < CHUNK_BYTES
