"""Kernels for tests of the fused decoder, and their levels."""

from collections.abc import Iterator

import pytest

from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from tests.unit.workers.built_kernels import built_kernels


@pytest.fixture(scope="module")
def kernels() -> Library:
    return built_kernels()


@pytest.fixture
def portable(kernels: Library) -> Iterator[None]:
    """Products in float32."""
    assert kernels.matmul.set_level(Level.PORTABLE)
    yield
    kernels.matmul.set_level(None)


@pytest.fixture(params=[None, Level.VNNI, Level.AVX2], ids=["best", "vnni", "avx2"])
def level(kernels: Library, request: pytest.FixtureRequest) -> Iterator[Level]:
    """Levels that serve models, each in turn."""
    if kernels.matmul.level() is Level.PORTABLE or not kernels.matmul.set_level(request.param):
        pytest.skip("this CPU does not have these instructions")
    yield kernels.matmul.level()
    kernels.matmul.set_level(None)
