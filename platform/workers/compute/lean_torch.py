"""How a process that serves on a CPU imports torch: without parts that it does not use, which are loaded when somebody
asks for something in them.

Of the 90 MB of Python that importing torch brings, 27 are for those who train, export, compile or try shapes on the
`meta` device. Invariant: a deferred module is in `sys.modules` under its name, and from the first name on that is asked
of it, it is the module that it would have been. Only operators of the `meta` device that torch has in Python are
missing until then: loading `torch._meta_registrations` registers them, of which nobody asks a name. (A stock
`importlib.util.LazyLoader` would load all of this at once, because `inspect.getmodule`, which torch calls, asks every
module for its file.)
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import _bootstrap
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TRIED = ("2.13",)
"""Versions of torch in which none of these modules is asked for anything while torch is imported. Another version is
imported whole: its modules may need each other in another order."""
UNUSED = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.optim",
    "torch.quantization",
    "torch.utils.data",
)
"""Modules that importing torch would load, and none of ours on a CPU needs."""


def import_torch(device: str) -> None:
    """Import torch for an engine on the device, which is that of its configuration. Whole, where it is not a CPU: other
    processes compute there too, and compile. Does nothing where torch has been imported."""
    version = importlib.metadata.version("torch")
    if device == "cpu" and version.startswith(tuple(f"{tried}." for tried in TRIED)):
        import_without("torch", UNUSED)
    else:
        importlib.import_module("torch")


def import_without(package: str, names: Sequence[str]) -> None:
    """Import a package; modules of it that are named are deferred, unless they are there already."""
    with _deferring(frozenset(names)):
        importlib.import_module(package)


@contextmanager
def _deferring(names: frozenset[str]) -> Iterator[None]:
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the named modules where they are, and has them loaded later."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Deferred(spec.loader)
        return spec


class _Deferred(Loader):
    """Loads a module when it is first asked for a name that it has not."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._has_begun = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty, with a function that loads it."""

        def load_and_get(name: str) -> Any:
            # who looks through all modules asks for such names; for __all__ does who wants what is in this one
            if not name.startswith("__") or name == "__all__":
                self._load(module)
            found = module.__dict__.get("__getattr__", load_and_get)
            if name in module.__dict__ or found is not load_and_get:
                return getattr(module, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        module.__dict__["__getattr__"] = load_and_get

    def _load(self, module: ModuleType) -> None:
        """Execute the module, unless that is done or this thread is at it."""
        # the import system's own lock of the module: it is known to those who import what is in it, and cycles of
        # threads are found, where one goes on with the module half loaded, as in any cycle of imports
        with _bootstrap._ModuleLockManager(module.__name__):  # type: ignore[attr-defined]
            if self._has_begun:
                return
            self._has_begun = True
            deferring = module.__dict__["__getattr__"]
            try:
                self._loader.exec_module(module)
            except BaseException:
                self._has_begun = False  # the next one is told too
                raise
            if module.__dict__["__getattr__"] is deferring:
                del module.__dict__["__getattr__"]
