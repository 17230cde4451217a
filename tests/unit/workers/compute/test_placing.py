import pytest
import torch

from penstock.workers.compute.placing import place_aside
from penstock.workers.compute.triton.staging import ALIGNMENT

CPU = torch.device("cpu")


def test_tensors_of_any_type_and_layout_are_copied_side_by_side() -> None:
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    tensors = [
        base[:, 2:5],
        base.t().bfloat16(),
        torch.empty(0, 3),
        torch.tensor([7], dtype=torch.int64),
        base[0].int(),
    ]

    placed = place_aside(tensors, CPU)

    for found, tensor in zip(placed, tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert found.is_contiguous()
        assert torch.equal(found, tensor)
        assert found.data_ptr() % ALIGNMENT == 0
    base.zero_()
    assert placed[0].any()
    assert len({found.untyped_storage().data_ptr() for found in placed}) == 1


@pytest.mark.parametrize("count", [0, 1])
def test_few_tensors_too(count: int) -> None:
    assert len(place_aside([torch.ones(3)] * count, CPU)) == count
