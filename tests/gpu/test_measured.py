"""Kernels chosen by made-up times, over real matrices: what is used then, what is remembered, and what is not
believed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.measured import (
    BUDGET_S,
    COMPILING_S,
    Budget,
    Calls,
    Timing,
    kind_of,
    measure,
    read_choices,
    remember,
    use_quickest,
)
from penstock.workers.compute.quant.quantized import quantize
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.compute.triton.products.int4_matrix import OperatorMatrix
from penstock.workers.compute.triton.products.kernel_choice import ROW_COUNTS, Kernel, choose
from penstock.workers.compute.triton.products.tiling import FEW, MIDDLE, TALL, WIDE
from tests.gpu.cases import DEVICE

OUTPUTS, COLUMNS = 64, 128
FIRST, SECOND, THIRD = FEW[16]


@dataclass
class Clock:
    """Times as a test says: a kernel's own, else a second. Each takes a second of the budget's clock, or `pace_s`."""

    seconds: dict[Kernel, float] = field(default_factory=dict)
    pace_s: float = 0.0
    now_s: float = 0.0
    num_timed: int = 0

    def time(self, calls: Calls) -> float:
        call: Any = calls[0]
        self.now_s += self.pace_s
        self.num_timed += 1
        return self.seconds.get("int4" if isinstance(call.func.__self__, OperatorMatrix) else call.args[0], 1.0)

    def timing(self, folder: Path) -> Timing:
        return Timing(self.time, lambda: self.now_s, folder / "choices.json", "a card")


def make_matrix(maker: Callable[..., GroupedMatrix] = GroupedMatrix) -> GroupedMatrix:
    torch.manual_seed(3)
    return maker(quantize(torch.randn(OUTPUTS, COLUMNS), 32), torch.bfloat16, DEVICE)


class Wrong(GroupedMatrix):
    """One kernel does not run, another one computes something else."""

    def multiply_by(self, kernel: Kernel, x: Tensor, *, keeps_parts: bool = False) -> Tensor:
        if kernel == SECOND:
            raise RuntimeError("no room")
        return super().multiply_by(kernel, x, keeps_parts=keeps_parts) * (1.5 if kernel == WIDE else 1)


def test_the_quickest_kernels_are_used_and_remembered(tmp_path: Path) -> None:
    clock = Clock({SECOND: 0.5, WIDE: 0.4})
    first, second = make_matrix(), make_matrix()

    assert not list(use_quickest({"a": first, "b": torch.ones(3)}, (), clock.timing(tmp_path)))
    timed = clock.num_timed
    assert not list(use_quickest({"c": second}, (), clock.timing(tmp_path)))

    assert timed == clock.num_timed > len(ROW_COUNTS)
    for matrix in (first, second):
        assert (matrix._kernels[16], matrix._kernels[128]) == (SECOND, WIDE)
    x = torch.randn(100, COLUMNS).bfloat16().to(DEVICE)
    assert torch.equal(first.multiply(x), second.multiply(x))


def test_a_matrix_changes_its_layout_where_torchs_operator_is_quicker(tmp_path: Path) -> None:
    matrix, x = make_matrix(), torch.randn(7, COLUMNS).bfloat16().to(DEVICE)
    expected = matrix.multiply(x).float()

    ((name, found),) = use_quickest({"a": matrix}, (), Clock({"int4": 0.1}).timing(tmp_path))

    assert name == "a"
    assert (found.shape, found.dtype, found.device.type) == (matrix.shape, matrix.dtype, DEVICE.type)
    torch.testing.assert_close(found.multiply(x).float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)
    assert found.multiply(x[:0]).shape == (0, OUTPUTS)


def test_a_table_keeps_its_layout(tmp_path: Path) -> None:
    matrix = make_matrix()

    assert not list(use_quickest({"embed": matrix}, ("embed",), Clock({"int4": 0.1}).timing(tmp_path)))
    assert matrix.rows(torch.tensor([3], device=DEVICE)).shape == (1, COLUMNS)


def test_kernels_that_fail_or_compute_something_else_are_not_timed(tmp_path: Path) -> None:
    matrix = make_matrix(Wrong)

    times = measure(kind_of(matrix, is_table=False), [matrix], Clock().timing(tmp_path), Budget(lambda: 0.0))

    assert SECOND not in times[16]
    assert {FIRST, THIRD, "int4"} == times[16].keys()
    assert {MIDDLE, TALL, "dense", "int4"} == times[128].keys()


def test_when_time_is_spent_the_rest_is_left_to_the_tables_and_nothing_is_remembered(tmp_path: Path) -> None:
    clock, matrix = Clock({SECOND: 0.5}, pace_s=BUDGET_S / 6), make_matrix()

    assert not list(use_quickest({"a": matrix}, (), clock.timing(tmp_path)))

    assert matrix._kernels == {16: SECOND}
    assert not (tmp_path / "choices.json").exists()


@pytest.mark.parametrize(("compiling_s", "is_whole"), [(COMPILING_S / 60, True), (COMPILING_S / 6, False)])
def test_compiling_takes_nothing_of_the_time_for_timing_and_has_a_limit_of_its_own(
    compiling_s: float, is_whole: bool, tmp_path: Path
) -> None:
    clock = Clock(pace_s=BUDGET_S / 60)

    class Compiling(GroupedMatrix):
        def multiply_by(self, kernel: Kernel, x: Tensor, *, keeps_parts: bool = False) -> Tensor:
            clock.now_s += compiling_s
            return super().multiply_by(kernel, x, keeps_parts=keeps_parts)

    list(use_quickest({"a": make_matrix(Compiling)}, (), clock.timing(tmp_path)))

    assert (tmp_path / "choices.json").exists() == is_whole


def test_a_kernel_whose_timing_fails_is_not_used(tmp_path: Path) -> None:
    matrix = make_matrix()

    def time(calls: Calls) -> float:
        call: Any = calls[0]
        if call.args[:1] == (FIRST,):
            raise RuntimeError("no capture")
        return 1.0

    times = measure(
        kind_of(matrix, is_table=False), [matrix], Clock().timing(tmp_path)._replace(timer=time), Budget(lambda: 0.0)
    )

    assert FIRST not in times[16]
    assert SECOND in times[16]


@pytest.mark.parametrize("text", ["", "[]", '{"a card": 3}', '{"a card": {"64 128": {"is_int4": 3}}}'])
def test_a_broken_file_is_written_anew(text: str, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(text)
    clock = Clock()

    assert not list(use_quickest({"a": make_matrix()}, (), clock.timing(tmp_path)))

    assert clock.num_timed
    assert kind_of(make_matrix(), is_table=False).name in file.read_text()


def test_another_card_is_measured_anew_and_both_are_remembered(tmp_path: Path) -> None:
    first, second = Clock(), Clock()

    list(use_quickest({"a": make_matrix()}, (), first.timing(tmp_path)))
    list(use_quickest({"a": make_matrix()}, (), second.timing(tmp_path)._replace(where="another card")))

    assert first.num_timed == second.num_timed
    text = (tmp_path / "choices.json").read_text()
    assert '"a card"' in text
    assert '"another card"' in text


def test_a_folder_that_nobody_can_write_to_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timing = Clock({SECOND: 0.5}).timing(tmp_path)._replace(file=tmp_path / "file" / "choices.json")
    matrix = make_matrix()

    assert not list(use_quickest({"a": matrix}, (), timing))
    assert matrix._kernels[16] == SECOND


def test_what_another_rank_has_written_meanwhile_stays(tmp_path: Path) -> None:
    timing = Clock().timing(tmp_path)
    choices = [choose({rows: {WIDE: 0.5, MIDDLE: 1.0} for rows in ROW_COUNTS}) for _ in range(2)]

    remember(timing, {"one shape": choices[0]})
    remember(timing, {"another": choices[1]})

    assert read_choices(timing).keys() == {"one shape", "another"}
