"""Levels of the kernels for tests of the fused decoder."""

from collections.abc import Iterator

import pytest

from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level


@pytest.fixture(params=[None, Level.VNNI, Level.AVX2], ids=["best", "vnni", "avx2"])
def level(kernels: Library, request: pytest.FixtureRequest) -> Iterator[Level]:
    """Levels that serve models, each in turn."""
    if kernels.matmul.level() is Level.PORTABLE or not kernels.matmul.set_level(request.param):
        pytest.skip("this CPU does not have these instructions")
    yield kernels.matmul.level()
    kernels.matmul.set_level(None)
