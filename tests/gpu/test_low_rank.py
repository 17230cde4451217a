"""LoRA's products for all adapters of a step against those of each adapter by itself, in float32, over random steps:
ranks that differ, modules that are missing, rows of the base between."""

import random
import threading
import time

import pytest
import torch
from torch import Tensor

from penstock.workers.compute.lora import (
    FUSED,
    AdapterRows,
    LoraAdapter,
    LowRank,
    Part,
    add_adapters,
    build_segments,
    make_adapter,
)
from penstock.workers.compute.triton import low_rank
from penstock.workers.compute.triton.segments import FEW_ROWS, LONG_TILE, Segments
from penstock.workers.compute.triton.staging import send_once
from tests.gpu.cases import DEVICE, NAN

SEEDS = range(8)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")
WIDTHS = {"qkv": (70, 20, 20), "o": (50,), "gate_up": (90, 90), "down": (60,)}
COLUMNS = {"qkv": 50, "o": 70, "gate_up": 40, "down": 200}
"""Columns of each matrix; with WIDTHS, its outputs, they are chosen so that no module ends where a tile does."""
LAYERS = 2


def draw_layers(seed: int, dtype: torch.dtype) -> list[dict[str, LowRank]]:
    """Each module is there two times of three, the first always; a module's rank is 1 to 40."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: matrix for name in FUSED if (matrix := make_matrix(name, draw, generator, dtype, name == "qkv"))}
        for _ in range(LAYERS)
    ]


def make_matrix(
    name: str, draw: random.Random, generator: torch.Generator, dtype: torch.dtype, is_sure: bool
) -> LowRank | None:
    parts: list[Part] = []
    start = 0
    for width in WIDTHS[name]:
        if is_sure or draw.random() < 2 / 3:
            parts.append(
                Part(start, start + width, torch.randn(width, draw.randint(1, 40), generator=generator).to(dtype))
            )
        is_sure, start = False, start + width
    rank = sum(part.b.shape[1] for part in parts)
    return LowRank(torch.randn(rank, COLUMNS[name], generator=generator).to(dtype), parts) if parts else None


def on(layers: list[dict[str, LowRank]], device: torch.device, dtype: torch.dtype) -> LoraAdapter:
    moved = [{name: converted(matrix, device, dtype) for name, matrix in layer.items()} for layer in layers]
    return make_adapter("a", moved, 0, device)


def converted(matrix: LowRank, device: torch.device, dtype: torch.dtype) -> LowRank:
    return LowRank(matrix.a.to(device, dtype), [part._replace(b=part.b.to(device, dtype)) for part in matrix.parts])


def make_rows(seed: int, num_adapters: int, num_tokens: int) -> list[Tensor | None]:
    """Rows of each adapter; the rows that nobody gets are the base's, and one adapter alone has all of them."""
    if num_adapters == 1:
        return [None]
    owners = torch.tensor(
        [random.Random(seed * 1000 + token).randrange(num_adapters + 1) for token in range(num_tokens)]
    )
    owners[:num_adapters] = torch.arange(num_adapters)
    return [(owners == adapter).nonzero().flatten() for adapter in range(num_adapters)]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_launch_adds_what_each_adapter_adds_to_its_rows(seed: int) -> None:
    dtype = tuple(TOLERANCE)[seed % 2]
    num_adapters, num_tokens = seed % 4 + 1, 6 + 3 * seed
    rows = make_rows(seed, num_adapters, num_tokens)
    made = [draw_layers(10 * seed + index, dtype) for index in range(num_adapters)]
    theirs = [AdapterRows(on(layers, CPU, torch.float32), own) for layers, own in zip(made, rows, strict=True)]
    segments = build_segments(
        [AdapterRows(on(layers, DEVICE, dtype), own) for layers, own in zip(made, rows, strict=True)],
        num_tokens,
    )
    compare(segments, theirs, num_tokens, dtype, tuple(FUSED)[seed // 2 % 4])


def compare(segments: Segments, theirs: list[AdapterRows], num_tokens: int, dtype: torch.dtype, name: str) -> None:
    wide = torch.full((num_tokens, COLUMNS[name] + 60), NAN, dtype=dtype)
    x = wide[:, : COLUMNS[name]].copy_(torch.randn(num_tokens, COLUMNS[name]))
    out = torch.randn(num_tokens, sum(WIDTHS[name])).to(dtype)
    expected, result = out.float(), out.to(DEVICE)
    layer = LAYERS - 1
    placed = segments.placed(*send_once([segments.rows.numpy(), segments.tiles.numpy()], DEVICE))

    add_adapters(theirs, layer, exact=False, name=name, out=expected, x=x.float())
    add_adapters(placed, layer, exact=False, name=name, out=result, x=wide.to(DEVICE)[:, : COLUMNS[name]])

    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(result.cpu().float(), expected, atol=tolerance, rtol=TOLERANCE[dtype])


def test_long_sums_are_cut_and_many_rows_taken_in_larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "SPLIT_COLUMNS", low_rank.TILE_COLUMNS)
    num_tokens = FEW_ROWS + 9
    made = [draw_layers(index, torch.float32) for index in range(2)]
    rows = [torch.arange(num_tokens - 5), torch.arange(num_tokens - 5, num_tokens)]
    theirs = [AdapterRows(on(layers, CPU, torch.float32), own) for layers, own in zip(made, rows, strict=True)]

    segments = build_segments(
        [AdapterRows(on(layers, DEVICE, torch.float32), own) for layers, own in zip(made, rows, strict=True)],
        num_tokens,
    )

    assert segments.tile_rows == LONG_TILE
    compare(segments, theirs, num_tokens, torch.float32, "down")


def test_an_adapter_without_a_matrix_leaves_its_rows_as_they_are() -> None:
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    qkv, o = (make_matrix(name, draw, generator, torch.float32, True) for name in ("qkv", "o"))
    assert qkv is not None
    assert o is not None
    full, other = on([{"qkv": qkv, "o": o}], DEVICE, torch.float32), on([{"qkv": qkv}], DEVICE, torch.float32)
    out = torch.zeros(4, 50, device=DEVICE)

    segments = build_segments([AdapterRows(full, torch.tensor([0, 3])), AdapterRows(other, torch.tensor([1, 2]))], 4)
    placed = segments.placed(*send_once([segments.rows.numpy(), segments.tiles.numpy()], DEVICE))
    add_adapters(placed, 0, exact=False, name="o", out=out, x=torch.ones(4, 70, device=DEVICE))

    assert out[[0, 3]].all()
    assert not out[[1, 2]].any()


def test_an_adapter_loads_beside_steps_that_are_under_way() -> None:
    is_done = threading.Event()

    def keep_busy() -> None:
        while DEVICE.type == "cuda" and not is_done.is_set():
            torch.cuda._sleep(50_000_000)  # some 30 ms
            torch.cuda._sleep(50_000_000)
            torch.cuda.synchronize()

    layers = [{"qkv": LowRank(torch.ones(8, 50), [Part(0, 70, torch.ones(70, 8))])} for _ in range(200)]
    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        begin_s = time.monotonic()
        adapter = make_adapter("a", layers, 0, DEVICE)
        took_s = time.monotonic() - begin_s
    finally:
        is_done.set()
        busy.join()

    assert took_s < 1.0, "400 copies behind steps would take 10 s"
    assert all(bool(tensor.eq(1).all()) for tensor in adapter.layers[-1]["qkv"].tensors)
