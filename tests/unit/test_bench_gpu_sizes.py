"""What the figures of a GPU's check ask of a card: what fits is counted before anything is allocated, on small cards
less is asked, and where nothing fits a row says so."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu.rows import Rows, read_rows
from bench.gpu.steps import gateway, ready, serving
from bench.gpu.steps.decode import add_rows
from bench.gpu.steps.engines import make_random_weights
from bench.gpu.steps.machine import FIELDS, add_clocks
from bench.gpu.steps.shapes import LLAMA_8B, SPARE_BYTES, TINY, VARIANTS, Bench, Variant, bench_for, make_weights
from bench.gpu.steps.sizes import Scale, decode_bytes, fitted, fitted_or_said, weight_bytes

DENSE, QUANTIZED = VARIANTS[:2]
GIB = 2**30


def card(free_gib: float) -> Bench:
    """The model of the figures on a card with so much memory free. Nothing is computed on it."""
    return Bench(LLAMA_8B, torch.device("cuda"), torch.bfloat16, 128, free_gib * GIB - SPARE_BYTES, 1, 1)


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda variant: variant.name)
def test_the_bytes_of_weights_are_those_that_are_made(variant: Variant) -> None:
    config = replace(TINY, vocab_size=512, hidden_size=512, intermediate_size=1024)  # where tiles need no filling up
    bench = bench_for(is_check=True)._replace(config=config, group_size=128)

    counted = weight_bytes(bench, variant)

    kept = sum(weight.nbytes for weight in make_random_weights(bench, variant).values())
    made = make_weights(bench, is_quantized=variant.is_quantized).values()
    groups = [weight.groups for weight in made if not isinstance(weight, torch.Tensor)]
    parts = [part for each in groups for part in (each.q, each.scale, each.offset) if part is not None]
    assert counted.kept == pytest.approx(kept, rel=0.05)
    assert counted.drawn == pytest.approx(sum(part.nbytes for part in parts), rel=0.05)


def test_of_llama_8b_a_card_of_24_gb_holds_single_decode_steps_and_one_of_80_all_that_is_planned() -> None:
    for variant, least in ((DENSE, 8), (QUANTIZED, 16)):
        held = sum(weight_bytes(card(0), variant))
        small, large = (
            [point for point in POINTS if held + decode_bytes(card(0), variant, *point) <= card(free).room_bytes]
            for free in (23.2, 79.0)
        )
        assert (least, 1024) in small
        assert (256, 1024) not in small
        assert (256, 1024) in large
        assert (64, 8192) not in large


POINTS = [(batch, context) for batch in (1, 8, 16, 64, 256) for context in (1024, 8192)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_decode_step_that_does_not_fit_is_a_row_and_nothing_is_made(variant: Variant, tmp_path: Path) -> None:
    bench = bench_for(is_check=True)._replace(room_bytes=0)

    add_rows(Rows(tmp_path / "rows"), bench, variant, [1, 8], [20])

    assert [row["name"] for row in read_rows(tmp_path / "rows")] == [
        f"{variant.name}: batch {batch} with a context of 20 does not fit" for batch in (1, 8)
    ]


@pytest.mark.parametrize("planned", [*serving.SCALES.values(), gateway.FULL])
def test_an_engine_is_halved_until_it_fits_and_each_half_holds_a_sequence(planned: Scale) -> None:
    for variant in VARIANTS[:2]:
        found = [fitted(planned, card(free), variant) for free in (79.0, 47.0, 23.2, 15.0, 7.0, 0.0)]

        assert found[0] == planned
        assert found[-1] is None
        sizes = [0 if scale is None else scale.num_blocks for scale in found]
        assert sizes == sorted(sizes, reverse=True)
        for scale in filter(None, found):
            assert 16 * scale.num_blocks >= scale.max_model_len
            assert (scale.prompt_tokens, scale.output_tokens) == (planned.prompt_tokens, planned.output_tokens)
            assert planned.num_blocks // scale.num_blocks == planned.max_num_seqs // scale.max_num_seqs
    assert fitted(planned, card(23.2), QUANTIZED) is not None


def test_two_replicas_share_weights_and_have_a_cache_each() -> None:
    one, two = (fitted(gateway.FULL, card(23.2), QUANTIZED, count) for count in (1, 2))

    assert one is not None
    assert two is not None
    assert two.num_blocks < one.num_blocks


def test_a_smaller_load_and_one_that_does_not_fit_are_rows(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")
    planned = serving.SCALES["sampled"]

    for free in (79.0, 23.2, 3.0):
        fitted_or_said(rows, f"{free}", planned, card(free), QUANTIZED)

    smaller, none = read_rows(tmp_path / "rows")
    assert smaller["name"] == "23.2: sequences at once"
    assert smaller["ours"] < planned.max_num_seqs
    assert none["name"] == "3.0: does not fit"


def test_kernels_compiled_after_readiness_make_the_step_fail(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows")

    assert serving.add_compiled(rows, "none", [])
    assert not serving.add_compiled(rows, "two", ["_b", "_a", "_b"])
    assert [(row["ours"], row.get("note")) for row in read_rows(tmp_path / "rows")] == [(0, None), (3, "_a, _b")]


def test_a_cold_start_finds_nothing_that_was_compiled_before(tmp_path: Path) -> None:
    environment = ready.environment_of(tmp_path, is_check=False)

    assert {environment[name] for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")} == {
        str(tmp_path), str(tmp_path / "triton"), str(tmp_path / "cuda"),
    }  # fmt: skip
    assert environment["PATH"] == os.environ["PATH"]


def test_nvidia_smi_is_asked_for_the_gpu_that_torch_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in --id=GPU-2) ;; --id=*) echo "No devices were found"; exit 6;; '
        '*) echo "A100, 1";; esac\n'
        'echo "H100, 580.65"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    rows = Rows(tmp_path / "rows")

    add_clocks(rows, "GPU-2")
    add_clocks(rows, "GPU-7")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    add_clocks(rows, "GPU-2")

    first, second, absent, none = read_rows(tmp_path / "rows")
    assert (first["name"], first["note"]) == (f"nvidia-smi {FIELDS[0]}", "H100")
    assert (second["name"], second["note"]) == (f"nvidia-smi {FIELDS[1]}", "580.65")
    assert absent["note"] == "ended with status 6: No devices were found"
    assert none["note"].startswith("not asked: ")


def test_a_start_is_measured_cold_and_warm(tmp_path: Path) -> None:
    assert ready.run(Rows(tmp_path / "rows"), is_check=True)

    rows = {row["name"]: row["ours"] for row in read_rows(tmp_path / "rows")}
    for label in ("cold, nothing compiled", "warm, compiled by another process"):
        assert rows[f"time to ready, {label}, the file in the page cache"] > 0
        assert rows[f"tokens of its KV cache, {label}"] > 0
