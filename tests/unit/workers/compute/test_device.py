from itertools import product
from typing import Any

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.workers.compute.device import (
    CPU,
    bring,
    check_cache_fits,
    check_cache_type,
    check_float8,
    check_room,
    find_device,
    place_weights,
)
from penstock.workers.compute.quant.float8 import Float8Tensor
from penstock.workers.compute.quant.quantized import quantize
from penstock.workers.compute.triton.products.float8_matrix import Float8Matrix
from penstock.workers.compute.triton.products.grouped_matrix import GroupedMatrix
from penstock.workers.config import EngineConfig

META = torch.device("meta")
"""A device that holds shapes only: stands for any that is not the CPU."""


def test_a_gpu_that_is_not_there_is_refused_with_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.device: cuda needs a GPU that torch can use, and here torch finds none"
    ):
        find_device("cuda", has_gpu=False)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_cpu_is_always_there(has_gpu: bool) -> None:
    assert find_device("cpu", has_gpu) == CPU


def test_a_gpu_that_is_there_is_taken() -> None:
    assert find_device("cuda", has_gpu=True).type == "cuda"


def test_dense_weights_move() -> None:
    moved = place_weights([("a", torch.ones(2, 3))], torch.float32, META)["a"]

    assert isinstance(moved, torch.Tensor)
    assert moved.device == META


def test_quantized_weights_are_packed_for_the_gpu() -> None:
    packed = place_weights([("a", quantize(torch.randn(16, 64), 32))], torch.bfloat16, CPU)["a"]

    assert isinstance(packed, GroupedMatrix)
    assert packed.dtype == torch.bfloat16
    assert packed.shape == (16, 64)


def test_quantized_weights_in_groups_that_the_kernels_do_not_cover_are_dequantized() -> None:
    quantized = quantize(torch.randn(4, 100), 48)

    dense = place_weights([("a", quantized)], torch.float32, CPU)["a"]

    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, quantized.dequantize())


@pytest.mark.parametrize(("columns", "kind"), [(64, Float8Matrix), (40, torch.Tensor)])
def test_matrices_of_8_bit_floats_stay_so_where_their_sizes_allow(columns: int, kind: type) -> None:
    weight = Float8Tensor(torch.randn(32, columns).to(torch.float8_e4m3fn), torch.rand(32))

    placed = place_weights([("a", weight)], torch.bfloat16, CPU)["a"]

    assert isinstance(placed, kind)
    assert placed.shape == (32, columns)
    assert placed.dtype == torch.bfloat16


def test_float8_keys_and_values_need_a_gpu_that_converts_them() -> None:
    check_float8((8, 9))
    check_float8((9, 0))
    check_cache_type(torch.float8_e4m3fn, CPU)
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or more, and this one has 8\.6"):
        check_float8((8, 6))


@pytest.mark.parametrize(("device", "kv_dtype"), [("cpu", "fp8"), ("cuda", "int8")])
def test_8_bit_keys_and_values_of_the_other_device_are_refused(device: Any, kv_dtype: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=f"kv_dtype: {kv_dtype} is not for device: {device}; "
        "8-bit keys and values are int8 on the CPU, fp8 on a GPU",
    ):
        EngineConfig(device=device, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("device", "kv_dtype"), [("cpu", "int8"), ("cuda", "fp8"), ("cuda", "bf16")])
def test_8_bit_keys_and_values_of_the_device_are_taken(device: Any, kv_dtype: Any) -> None:
    assert EngineConfig(device=device, kv_dtype=kv_dtype).kv_dtype == kv_dtype


@pytest.mark.parametrize("block_size", [4, 256])
def test_blocks_that_no_gpu_kernel_was_tried_with_are_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be from 8 to 128 for device: cuda, not {block_size}"):
        EngineConfig(device="cuda", block_size=block_size)
    assert EngineConfig(device="cuda", block_size=8).block_size == EngineConfig(block_size=8).block_size
    assert EngineConfig(device="cuda", runner="vllm", block_size=block_size).block_size == block_size


def test_a_cache_larger_than_what_is_free_on_the_gpu_is_refused() -> None:
    check_room(2**30, 2**30)
    with pytest.raises(ConfigError, match=r"takes 2\.0 GiB .* more than the 1\.0 GiB that are free"):
        check_room(2**31, 2**30)


def test_the_hosts_memory_is_not_checked_here() -> None:
    check_cache_fits(2**60, CPU)


def test_each_replica_with_device_cuda_takes_a_gpu() -> None:
    assert EngineConfig(device="cuda").num_gpus == 1
    assert EngineConfig(device="cuda", tensor_parallel_size=4).num_gpus == 4
    assert EngineConfig(tensor_parallel_size=4).num_gpus == 0
    assert EngineConfig().num_gpus == 0


@pytest.mark.parametrize(
    ("activations", "settings"),
    [
        *product(("int8", "int16"), ({"device": "cuda"}, {"exact": True}, {"dtype": "float32"}, {"runner": "vllm"})),
        ("bf16", {"runner": "vllm"}),
    ],
)
def test_activations_are_refused_where_nothing_would_come_of_them(activations: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"activations: {activations} is for our own engine"):
        EngineConfig(activations=activations, **settings)


@pytest.mark.parametrize("activations", ["auto", "bf16", "int8", "int16"])
def test_all_activations_are_for_our_own_engine_on_a_cpu(activations: Any) -> None:
    assert EngineConfig(activations=activations).activations == activations


def test_a_result_is_brought_as_it_was_whatever_is_written_over_it() -> None:
    result = torch.tensor([1, 2])

    wait = bring(result)
    result += 5

    assert wait().tolist() == [1, 2]
