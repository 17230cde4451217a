"""Counts what Triton compiles, or loads for the first time in this process, while it is open: behind readiness there
should be nothing."""

from types import TracebackType
from typing import Any, Self

from triton import knobs


class Compilations:
    """Use as a context manager; one at a time. In the interpreter nothing is compiled, and nothing counted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Kernels, once for each specialization, in order."""
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._count
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        knobs.runtime.jit_post_compile_hook = self._before

    def _count(self, *_arguments: Any, **named: Any) -> None:
        function = named.get("fn")
        self.names.append(str(getattr(function, "name", named.get("repr", "a kernel"))))
