import pytest
import torch

from penstock.wire.errors import ConfigError
from penstock.workers.config import EngineConfig
from penstock.workers.device import CPU, check_cache_fits, check_room, find_device, placed
from penstock.workers.lora import Share
from penstock.workers.quant.int4 import Int4Matrix, quantize

META = torch.device("meta")
"""A device that holds shapes only: stands for any that is not the CPU."""


def test_a_gpu_that_is_not_there_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"engine.device: cuda needs a GPU that torch can use, and here torch finds none"):
        find_device("cuda", has_gpu=False)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_cpu_is_always_there(has_gpu: bool) -> None:
    assert find_device("cpu", has_gpu) == CPU


def test_a_gpu_that_is_there_is_taken() -> None:
    assert find_device("cuda", has_gpu=True).type == "cuda"


def test_weights_stay_what_they_are_on_the_cpu() -> None:
    dense, packed = torch.ones(2, 3), Int4Matrix(quantize(torch.randn(16, 32), 32), torch.bfloat16)

    on_cpu = placed({"a": dense, "b": packed}, CPU)

    assert on_cpu["a"] is dense
    assert on_cpu["b"] is packed


def test_dense_weights_move() -> None:
    moved = placed({"a": torch.ones(2, 3)}, META)["a"]

    assert isinstance(moved, torch.Tensor)
    assert moved.device == META


def test_int4_weights_are_refused_elsewhere_than_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"quantized to int4, which is computed on the cpu only"):
        placed({"a": Int4Matrix(quantize(torch.randn(16, 32), 32), torch.float32)}, META)


def test_a_cache_larger_than_what_is_free_on_the_gpu_is_refused() -> None:
    check_room(2**30, 2**30)
    with pytest.raises(ConfigError, match=r"takes 2\.0 GiB .* more than the 1\.0 GiB that are free"):
        check_room(2**31, 2**30)


def test_the_hosts_memory_is_not_checked_here() -> None:
    check_cache_fits(2**60, CPU)


def test_the_rows_of_an_adapter_move_and_all_of_them_need_not() -> None:
    some, every = (Share(None, rows).on(META) for rows in (torch.arange(3), None))  # type: ignore[arg-type]

    assert some.rows is not None
    assert some.rows.device == META
    assert every.rows is None


def test_each_replica_with_device_cuda_takes_a_gpu() -> None:
    assert EngineConfig(device="cuda").num_gpus == 1
    assert EngineConfig().num_gpus == 0
