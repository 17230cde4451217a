"""The CPU kernels for tests: where a compiler is, they must build."""

import pytest

from penstock.base.native import find_compilers
from penstock.workers.compute.kernels.build import load_kernels
from penstock.workers.compute.kernels.library import Library


def built_kernels() -> Library:
    """Skips the test where nothing can build them; fails it where something can and they don't."""
    found = load_kernels()
    if found is None:
        assert not find_compilers(), "the kernels do not build"
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    return found
