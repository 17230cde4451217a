"""The kernels on a machine without a GPU: tests/gpu in Triton's interpreter, and a compiler's word that they are valid
for real ones.

In processes of their own: which of the two Triton does is decided when it is first imported, and other tests' libraries
import it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
IS_FULL = bool(os.environ.get("PENSTOCK_TEST_FULL"))
NUM_SHAPES = 25 if IS_FULL else 13


LATER = (
    ("matmul", "measured", "loading", "parallel", "scaled"),
    ("capture", "float8", "low_rank", "replay", "scoring"),
    ("mixed_replay",),
)
"""Tests of kernels that `make test` leaves out, in a process for each line."""


def run(*arguments: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_interpreter_kernels_and_model_equal_plain_torch_over_random_shapes() -> None:
    assert num_passed("tests/gpu/test_kernels.py", "tests/gpu/test_model.py") > 2 * NUM_SHAPES


@pytest.mark.timeout(600)
def test_in_the_interpreter_what_lies_between_products_equals_torch_operators() -> None:
    assert num_passed("tests/gpu/test_glue.py") > 2 * NUM_SHAPES


def num_passed(*paths: str) -> int:
    output = run("pytest", *paths, "-q", "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert not re.search(r"\d+ (skipped|failed|error)", output)
    return int(passed[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", LATER)
def test_in_the_interpreter_products_8_bit_caches_adapters_and_replayed_steps_equal_their_twins(
    names: tuple[str, ...],
) -> None:
    assert num_passed(*(f"tests/gpu/test_{name}.py" for name in names)) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_interpreter_tokens_are_chosen_as_on_the_host() -> None:
    assert num_passed("tests/gpu/test_sample.py", "tests/gpu/test_step_choice.py") > 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_interpreter_steps_ahead_have_the_tokens_that_the_host_chooses_one_after_the_other() -> None:
    assert num_passed("tests/gpu/test_overlap.py") > NUM_SHAPES


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["none", "ngram", "draft"] if IS_FULL else ["draft"])
def test_the_warm_up_has_every_kernel_that_a_drawn_load_of_every_feature_needs(method: str) -> None:
    assert num_passed("tests/gpu/test_warm_up.py", "-k", method) == 1


COMPILED = (
    ["sm_80", "attention"],
    ["sm_80", "--without", "attention"],
    ["sm_86"],  # the least shared memory
    ["sm_89"],
    ["sm_90", "attention"],
    ["sm_90", "--without", "attention"],
    ["sm_100", "attention"],
    ["sm_100", "--without", "attention"],
)
"""Parts of `python -m tests.gpu.compile_ahead` that take about as long, together all of it."""
ALWAYS = "sm_90"
"""The card that has every kernel; the others with PENSTOCK_TEST_FULL."""


def test_every_kernel_is_compiled_for_8_0_9_0_and_10_0_and_those_that_choose_tiles_for_8_6_too() -> None:
    names = run("tests.gpu.compile_ahead", "--list").splitlines()

    by_card: dict[str, set[str]] = {}
    for name in names:
        before, card, after = re.split(r"(sm_\d+)", name)
        by_card.setdefault(card, set()).add(before if before.startswith(("attention", "multiply")) else before + after)
        parts = [card], [card, "attention"] if "attention" in name else [card, "--without", "attention"]
        assert any(part in COMPILED for part in parts), f"{name} is in no part"
    eight_bits = {"scale row "}
    assert by_card["sm_90"] == by_card["sm_100"] == by_card["sm_80"] | eight_bits
    assert len(by_card["sm_80"]) > 60
    assert by_card["sm_86"] == {name for name in by_card["sm_80"] if name.startswith(("attention", "multiply"))}
    assert by_card["sm_89"] == {name for name in by_card["sm_80"] if name.startswith("attention")} | eight_bits


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chosen", COMPILED if IS_FULL else [part for part in COMPILED if part[0] == ALWAYS])
def test_the_kernels_compile_for_nvidia_gpus_within_their_shared_memory(chosen: list[str], tmp_path: Path) -> None:
    lines = run("tests.gpu.compile_ahead", *chosen, TRITON_CACHE_DIR=str(tmp_path)).splitlines()

    assert len(lines) > 20
    assert all(int(line.split(": ")[-1].split()[0]) > 0 for line in lines)


def test_every_variant_of_attention_that_serving_can_meet_is_compiled_ahead_and_no_step_brings_another() -> None:
    run("tests.gpu.compile_ahead", "--coverage")
