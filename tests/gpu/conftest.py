"""Tests of the GPU backend. They run where torch finds a GPU; those of kernels and model also on the CPU, in Triton's
interpreter, when TRITON_INTERPRET=1 is set before Triton is first imported."""

import pytest
import torch

from tests.gpu.cases import DEVICE


def pytest_configure(config: pytest.Config) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.exit(
            "torch finds no GPU here; "
            "set TRITON_INTERPRET=1 to run the tests of kernels and model in Triton's interpreter",
            returncode=2,
        )
