import pytest
import torch

from penstock.workers.compute.kernels.low_rank import Module, PackedAdapter, packed_bytes


@pytest.mark.parametrize("rank", [1, 2, 7, 64])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_packed_adapter_takes_what_is_reckoned_for_it(rank: int, bits: int) -> None:
    modules = [
        Module(0, 40, torch.randn(rank, 72), torch.randn(40, rank)),
        Module(40, 56, torch.randn(rank, 72), torch.randn(16, rank), torch.randn(16)),
    ]

    packed = PackedAdapter([[modules, []], [[], modules[:1]]], bits)

    first, second = packed_bytes(rank, 40, 72, bits), packed_bytes(rank, 16, 72, bits, has_factor=True)
    assert packed.nbytes == 2 * first + second
    assert second == packed_bytes(rank, 16, 72, bits) + 64
    assert packed.widest_rank == 2 * (rank + rank % 2)
    assert packed.num_layers == 2


def test_elements_of_two_bytes_take_no_more_than_their_padding() -> None:
    assert packed_bytes(8, 64, 96) == 2 * (8 * 96 + 64 * 8)
    assert packed_bytes(7, 50, 65) == 2 * (8 * 96 + 64 * 8)


def test_elements_of_a_byte_take_half_and_their_scales() -> None:
    assert packed_bytes(16, 64, 96, 8) == 16 * 96 + 64 * 16 + 4 * 16 + 2 * 64
