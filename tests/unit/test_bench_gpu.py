"""The GPU's check where there is none: its steps run, tiny, in Triton's interpreter; without, it says what it needs and
fails."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gpu import plan
from bench.gpu.command import main, seconds
from bench.gpu.steps.shapes import VARIANTS
from tests.gpu.test_warm_up import KINDS, TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
GATEWAY = "gateway and replica: int4-g128"
QUICK = (
    "machine",
    "copy bandwidth",
    *(f"decode: {variant.name}, batch 8 64 256, context 1024" for variant in VARIANTS if "fp8" not in variant.name),
    "decode: int4-g128, fp8 KV, batch 1 64 256, context 1024 8192",
    GATEWAY,
)
"""Steps of `make test`; `make test-slow` runs the others."""
SUITE = "tests: replay"
"""The one step of a file of tests/gpu that is run here: test_interpreted runs all of them."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "bench.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False, timeout=580
    )


def steps_of(record: Path) -> dict[str, str]:
    """Status of each step in a record."""
    return {name: step["status"] for name, step in json.loads(record.read_text())["steps"].items()}


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_in_the_interpreter_every_variant_has_torchs_logits_and_a_gateway_gets_whole_answers(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"

    done = run("--check", "--record", str(record), "--only", *QUICK)

    assert done.returncode == 0, done.stdout + done.stderr
    for variant in VARIANTS:
        for batch in (1, 3):
            assert f"{variant.name}, batch {batch}, context 20: decoding (ours), eager torch (rival)" in done.stdout
            assert f"{variant.name}, batch {batch}, context 20: share of copy bandwidth" in done.stdout
    assert "bf16: batch 9999 with a context of 20 does not fit" in done.stdout
    assert "these times mean nothing" in done.stdout
    assert steps_of(record) == dict.fromkeys(QUICK, "done")
    rows = {row["name"]: row for row in json.loads(record.read_text())["rows"] if row["step"] == GATEWAY}
    moved = rows["gateway, int4-g128: answers that went on elsewhere when a replica was lost"]
    assert moved["ours"] > 0
    assert moved["note"] == "all answers are whole"
    assert rows["gateway, int4-g128: draft tokens accepted"]["ours"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_the_interpreter_every_other_step_holds_too(tmp_path: Path) -> None:
    record = tmp_path / "gpu.json"
    others = [
        step.name
        for step in plan.STEPS
        if step.is_checked and step.name not in QUICK and (step.module != "suite" or step.name == SUITE)
    ]

    done = run("--check", "--record", str(record), "--only", *others)

    assert steps_of(record) == dict.fromkeys(others, "done"), done.stdout[-6000:] + done.stderr
    assert done.returncode == 0


@pytest.mark.timeout(300)
def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")

    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert done.stdout == ""


def test_a_step_that_is_not_there_is_refused_with_the_names_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "decode"]) == 2
    assert "no step and no group is called 'decode'" in capsys.readouterr().err
    assert main(["--list", "--only", "figures"]) == 0
    assert "copy bandwidth" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "expected"), [("540", 540), ("90s", 90), ("9m", 540), ("0.5h", 1800)])
def test_a_budget_has_a_unit_or_is_seconds(text: str, expected: float) -> None:
    assert seconds(text) == expected
    with pytest.raises(ValueError, match="write 540, 90s or 9m"):
        seconds(f"{text} minutes")


def test_the_steps_have_names_of_their_own_and_modules_and_the_most_telling_come_first() -> None:
    names = [step.name for step in plan.STEPS]

    assert len(set(names)) == len(names)
    assert {step.group for step in plan.STEPS} == set(plan.GROUPS)
    for step in plan.STEPS:
        assert (ROOT / "bench" / "gpu" / "steps" / f"{step.module}.py").is_file()
    assert_in_order(
        names, "machine", "tests: kernels", "decode: int4-g128, batch 1, context 1024",
        "decode: bf16, batch 1, context 1024", "copy bandwidth", "engine: int4-g128, sampled", "vLLM",
    )  # fmt: skip
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {f"test_{name.removeprefix('tests: ')}.py" for name in names if name.startswith("tests: ")} == files


def test_what_25_minutes_reach_is_the_most_telling_and_the_guide_says_so() -> None:
    sure = plan.reached(plan.STEPS, plan.CLAIM_S)
    minutes = sum(step.limit_s for step in plan.STEPS) / 60

    assert sum(step.limit_s for step in sure) <= plan.CLAIM_S < sum(step.limit_s for step in plan.STEPS)
    assert {
        "tests: kernels", "tests: model", "tests: sample", "tests: warm_up", "decode: int4-g128, batch 1, context 1024",
        "decode: bf16, batch 1, context 1024", "engine: int4-g128, sampled", "engine: bf16, prompts", GATEWAY,
    } <= {step.name for step in sure}  # fmt: skip
    assert (
        f"25 minutes reach the first {len(sure)} of the {len(plan.STEPS)} steps, to `{sure[-1].name}`, even if each "
        f"takes its limit; all limits are {minutes:.0f} minutes"
    ) in " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())


def test_the_loads_of_the_warm_ups_test_fit_into_its_step() -> None:
    (step,) = plan.select(plan.STEPS, ["tests: warm_up"])

    assert len(KINDS) * TIMEOUT_S["cuda"] < step.limit_s


def assert_in_order(names: Sequence[str], *expected: str) -> None:
    places = [names.index(name) for name in expected]
    assert places == sorted(places)


@pytest.mark.parametrize("target", ["gpu-tests", "bench-gpu"])
def test_with_a_python_of_ones_own_make_touches_no_environment(target: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MFLAGS")}
    said = [
        subprocess.run(
            ["make", "-n", target, *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True, check=True
        ).stdout
        for arguments in (["PYTHON=python3", "WHEELS=some/wheels", "ARGS=--budget 9m"], [])
    ]

    assert ".venv" not in said[0]
    assert "exec python3 -m bench.gpu" in said[0]
    assert "--wheels some/wheels --budget 9m" in said[0]
    assert ".venv/bin/python -m bench.gpu" in said[1]
