"""What Triton compiles, or on a machine without a GPU would compile: by the keys under which it keeps machine code,
made of arguments' types, of what it specialises on in their values, of constants and options."""

from types import TracebackType
from typing import Any, Self

from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from tests.gpu.cases import DEVICE

TARGET = ("cuda", 90, 32)
"""GPU for which the interpreter's launches are keyed, and the threads of its warps."""


class Launches:
    """Use as a context manager. On a GPU `keys` are those that were compiled meanwhile, in the interpreter all that
    were launched."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()
        """Kernel and key."""
        self._binders: dict[Any, Any] = {}
        self._before: Any = None

    def __enter__(self) -> Self:
        if DEVICE.type == "cuda":
            self._before = knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_post_compile_hook = self._note_compiled
            return self
        run = self._before = InterpretedFunction.run

        def noted(kernel: Any, *args: Any, **named: Any) -> Any:
            self._note(kernel, args, named)
            return run(kernel, *args, **named)

        InterpretedFunction.run = noted
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if DEVICE.type == "cuda":
            knobs.runtime.jit_post_compile_hook = self._before
        else:
            InterpretedFunction.run = self._before

    def _note_compiled(self, *_arguments: Any, **named: Any) -> None:
        self.keys.add((named["fn"].name, str(named["key"])))

    def _note(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        # where only what is compiled counts, Triton may be another version, with other names for these
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415 (see above)
        from triton.compiler.compiler import make_backend  # noqa: PLC0415 (see above)
        from triton.runtime.jit import (  # noqa: PLC0415 (see above)
            JITFunction,
            compute_cache_key,
            create_function_from_signature,
        )

        if kernel not in self._binders:
            function = JITFunction(kernel.fn, **kernel.kwargs)
            backend = make_backend(GPUTarget(*TARGET))
            self._binders[kernel] = create_function_from_signature(function.signature, function.params, backend)
        given = {name: value for name, value in named.items() if name not in ("grid", "warmup")}
        _, specialization, options = self._binders[kernel](*args, **given)
        self.keys.add((kernel.fn.__name__, compute_cache_key({}, specialization, options)))
