"""AutoAWQ's layout against tensors that AutoAWQ packed (make_autoawq_golden.py), and there and back."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from penstock.workers.compute.quant import awq
from penstock.workers.compute.quant.quantized import QuantizedTensor

GOLDEN = load_file(Path(__file__).with_name("autoawq_golden.safetensors"))


def test_what_autoawq_packed_is_unpacked_to_the_same_integers() -> None:
    rows, columns = GOLDEN["q"].shape
    quantized = QuantizedTensor.empty(rows, columns, columns // GOLDEN["scales"].shape[0])

    awq.copy_groups(GOLDEN["qweight"], GOLDEN["qzeros"], GOLDEN["scales"], quantized)

    assert torch.equal(quantized.q, GOLDEN["q"])
    assert torch.equal(quantized.zero, GOLDEN["zero"].float())
    assert torch.equal(quantized.scale, GOLDEN["scales"].float().t())


def test_what_is_packed_here_equals_what_autoawq_packed_bit_for_bit() -> None:
    scale = GOLDEN["scales"].float().t().contiguous()
    quantized = QuantizedTensor(GOLDEN["q"], scale, -GOLDEN["zero"].float() * scale, 128)

    packed = awq.tensors_of(quantized)

    assert all(torch.equal(packed[name], GOLDEN[name]) for name in ("qweight", "qzeros", "scales"))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_packing_there_and_back_changes_nothing(rows: int, words: int, seed: int) -> None:
    columns = torch.randint(0, 16, (rows, 8 * words), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(awq.unpack(awq.pack(columns)), columns)
