"""The GPU's benchmark where there is none: it runs, tiny, in Triton's interpreter; without, it says what it needs and
fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "bench.gpu", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.timeout(300)
def test_in_the_interpreter_every_variant_has_torchs_logits_and_its_figures() -> None:
    done = run("--check", TRITON_INTERPRET="1")

    assert done.returncode == 0, done.stdout + done.stderr
    for variant in VARIANTS:
        for batch in (1, 3):
            assert f"{variant.name}, batch {batch}, context 20: decoding (ours), eager torch (rival)" in done.stdout
            assert f"{variant.name}, batch {batch}, context 20: share of copy bandwidth" in done.stdout
    assert "bf16: batch 9999 with a context of 20 does not fit" in done.stdout
    assert "these times mean nothing" in done.stdout


@pytest.mark.timeout(300)
def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")

    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert done.stdout == ""
