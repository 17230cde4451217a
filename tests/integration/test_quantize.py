"""`penstock quantize` on the demo model, killed in the middle and begun again; its perplexities, and its checkpoint
through the whole platform."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from bench.support.platform_process import penstock, running_platform

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = """
gateway: {{port: {port}}}
pools:
  - {{name: int4, model: MODEL, served_names: [int4], tier: edge, replicas: 1}}
"""
KILLED_BEHIND = "layer 3 of 30\n"
ROOT = Path(__file__).resolve().parents[2]


class Made(NamedTuple):
    folder: Path
    killed: str
    """What the run that was killed said."""
    printed: str
    """What the next one said."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Group 128. Calibrated and compared with what the project says of itself."""
    folder = tmp_path_factory.mktemp("awq")
    calibration, evaluation = folder / "calibration.txt", folder / "evaluation.txt"
    calibration.write_text(
        "".join(
            (ROOT / name).read_text(encoding="utf-8")[:8000] for name in ("README.md", "docs/decisions/kernels.md")
        ),
        encoding="utf-8",
    )
    evaluation.write_text((ROOT / "docs" / "openai-api.md").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    out, settings = (
        folder / "int4",
        ("--calibration", str(calibration), "--evaluation", str(evaluation), "--sequences", "2"),
    )
    command = penstock("quantize", "demo", str(out), *settings)
    killed = _killed(command, KILLED_BEHIND)
    assert not out.exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    return Made(out, killed, done.stdout)


def _killed(command: list[str], behind: str) -> str:
    """A run that is killed when it has said that; what it said."""
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if line == behind:
                process.kill()
    return said


def test_a_quantized_demo_model_still_knows_paris(made: Made, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with running_platform(tmp_path, CONFIG.replace("MODEL", str(made.folder))) as platform:
        client = openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key)
        answer = client.chat.completions.create(
            model="int4",
            messages=question,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
        )
        client.close()

    assert "Paris" in (answer.choices[0].message.content or "")


def test_awq_loses_less_than_rounding_does(made: Made, record_property: Callable[[str, object], None]) -> None:
    found = {
        name: float(value)
        for name, value in re.findall(r"(bfloat16|float32|AWQ|round to nearest)\W+([\d.]+)", made.printed)
    }

    for name, value in found.items():
        record_property(name, value)
    (dense,) = found.keys() - {"AWQ", "round to nearest"}
    assert found[dense] < found["AWQ"] < found["round to nearest"]


def test_a_run_that_was_killed_goes_on_behind_the_layers_it_had_written(made: Made) -> None:
    assert made.killed.startswith("layer 0 of 30\n")
    assert re.match(r"layer ([3-9]|1\d) of 30\n", made.printed), "not the first one again"
    assert made.printed.count("of 30\n") <= 28
    assert not made.folder.with_name("int4.partial").exists()
