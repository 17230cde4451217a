"""A GPU's check in an environment with nothing but torch, Triton, pytest and the small wheels: no network, Ray, Redis
or model. The environment is made of what is installed here; packages of wheels.txt become wheels again."""

import email
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.gpu import wheels
from tests.unit.test_bench_gpu_wheels import ENVIRONMENT, ROOT, closure, listed

SHOWN = (
    "machine",
    "tests: kernels",
    "decode: int4-g128, batch 1, context 1024",
    "engine: int4-g128, sampled",
    "engine beside transformers",
    "gateway and replica: int4-g128",
)


def make_environment(folder: Path, names: set[str]) -> Path:
    """An environment of these installed distributions alone; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def make_wheel(folder: Path, name: str) -> None:
    """The wheel that the installed distribution came in, but for its scripts."""
    distribution = importlib.metadata.distribution(name)
    tags = [
        tag.split("-") for tag in email.message_from_string(distribution.read_text("WHEEL") or "").get_all("Tag", [])
    ]
    parts = [".".join(sorted(set(part))) for part in zip(*tags, strict=True)]
    label = "-".join([distribution.metadata["Name"].replace("-", "_"), distribution.version, *parts])
    with zipfile.ZipFile(folder / f"{label}.whl", "w") as archive:
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_else_is_needed_and_what_is_missing_is_a_row(tmp_path: Path) -> None:
    inside = closure(ENVIRONMENT)
    python = make_environment(tmp_path / "environment", inside)
    folder, record = tmp_path / "wheels", tmp_path / "gpu.json"
    folder.mkdir()
    for name in listed():
        make_wheel(folder, name)
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    only = " ".join(f"'{name}'" for name in SHOWN)
    arguments = f"ARGS=--check --budget 5m --record {record} --only {only}"
    command = ["make", "bench-gpu", f"PYTHON={python}", f"WHEELS={folder}", arguments]

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=380)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    saved = json.loads(record.read_text())
    statuses = {name: step["status"] for name, step in saved["steps"].items()}
    expected = dict.fromkeys(SHOWN, "done") | {"engine beside transformers": "missing"}
    assert statuses == expected
    assert len(saved["wheels"]) == len(set(map(wheels.normal, listed())) - inside)
