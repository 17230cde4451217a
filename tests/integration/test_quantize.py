"""`penstock quantize` on the demo model, and its checkpoint through the whole platform."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from bench.platform_process import running_platform
from penstock.workers.quant.quantize import model_perplexity

pytestmark = [pytest.mark.platform, pytest.mark.timeout(400)]

CONFIG = """
gateway: {{port: {port}}}
pools:
  - {{name: int4, model: MODEL, served_names: [int4], tier: edge, replicas: 1}}
"""
SEQUENCES = "4"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the project says of itself: text to calibrate with, and other text to compare by."""
    folder, root = tmp_path_factory.mktemp("texts"), Path(__file__).resolve().parents[2]
    calibration, evaluation = folder / "calibration.txt", folder / "evaluation.txt"
    calibration.write_text(
        (root / "README.md").read_text(encoding="utf-8")[:8000] + (root / "CONTRIBUTING.md").read_text(encoding="utf-8")[:8000], encoding="utf-8"
    )
    evaluation.write_text((root / "docs" / "openai-api.md").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return calibration, evaluation


def quantized(out: Path, calibration: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "penstock.cli.main", "quantize", "demo", str(out), "--calibration", str(calibration), "--sequences", SEQUENCES, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory, texts: tuple[Path, Path]) -> Path:
    return quantized(tmp_path_factory.mktemp("awq") / "int4", texts[0])


def test_a_quantized_demo_model_still_knows_paris(awq: Path, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with running_platform(tmp_path, CONFIG.replace("MODEL", str(awq))) as platform:
        client = openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key)
        answer = client.chat.completions.create(model="int4", messages=question, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        client.close()

    assert "Paris" in (answer.choices[0].message.content or "")


def test_awq_loses_less_than_rounding_does(awq: Path, tmp_path: Path, texts: tuple[Path, Path], record_property: Callable[[str, object], None]) -> None:
    rounded = quantized(tmp_path / "rtn", texts[0], "--method", "rtn")
    text = texts[1].read_text(encoding="utf-8")

    found = {name: model_perplexity(str(model), text, 1024) for name, model in (("bfloat16", "demo"), ("awq", awq), ("rtn", rounded))}

    for name, value in found.items():
        record_property(name, value)
    assert found["bfloat16"] < found["awq"] < found["rtn"]


def test_what_can_not_be_quantized_is_refused_with_a_sentence(awq: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "quantize", str(awq), str(tmp_path / "again"), "--calibration", str(texts[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "is quantized already" in done.stderr
