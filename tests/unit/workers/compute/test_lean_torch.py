"""Parts of torch that a CPU's replica does not use: absent at first, whole once somebody asks for something in them."""

import importlib.metadata
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.workers.compute.lean_torch import TRIED, UNUSED, import_without
from tests.unit.workers.tiny_models import saved, tiny_model

DEFERRED = """
import json, sys
from penstock.workers.compute.lean_torch import UNUSED, import_torch

def deferred():
    return [name for name in UNUSED if "load_and_get" in str(sys.modules[name].__dict__.get("__getattr__"))]

"""
ASKED = """
import_torch(sys.argv[1])
import torch
found = [deferred()]
dot = lambda: list(torch.dot(torch.empty(3, device="meta"), torch.empty(3, device="meta")).shape)
try:
    found.append(dot())
except NotImplementedError:
    found.append(None)
from torch.optim import SGD
found.append([SGD.__name__, float(torch.distributions.Normal(2.0, 1.0).mean), torch.utils.data.DataLoader.__name__])
torch._meta_registrations.meta_sort
found += [dot(), deferred()]
print(json.dumps(found))
"""
SERVED = """
import_torch("cpu")
from penstock.text.source import resolve
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import measure
config = EngineConfig(block_size=16, max_num_seqs=2, kv_memory_bytes=1 << 20, threads=1, exact=sys.argv[2] == "exact")
costs = measure(load_runner(resolve(sys.argv[1]), config), config)
print(json.dumps([costs.row_s >= 0, deferred()]))
"""


def test_the_installed_torch_is_one_in_which_deferring_was_tried() -> None:
    version = importlib.metadata.version("torch")

    assert version.startswith(tuple(f"{tried}." for tried in TRIED)), (
        "try it, by the tests below: no module may be loaded while torch is imported; then add the version"
    )


def test_what_is_deferred_is_whole_once_somebody_asks() -> None:
    before, dot_before, asked, dot_after, after = run(ASKED, "cpu")

    assert before == list(UNUSED)
    assert dot_before is None
    assert asked == ["SGD", 2.0, "DataLoader"]
    assert dot_after == []
    assert set(before) - set(after) >= {"torch.optim", "torch.distributions", "torch._meta_registrations"}


def test_torch_is_imported_whole_for_a_gpu() -> None:
    before, dot_before, *_ = run(ASKED, "cuda")

    assert before == []
    assert dot_before == []


@pytest.mark.parametrize("how", ["fused", "exact"])
def test_an_engine_asks_for_nothing_that_is_deferred(tmp_path: Path, how: str) -> None:
    source = saved(tiny_model("llama"), tmp_path)

    assert run(SERVED, str(source.path), how) == [True, list(UNUSED)]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a package whose module `late` counts how often it was executed."""
    name = f"deferred_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("times = []\nfrom . import broken, late\n")
    (folder / "late.py").write_text(
        f"import sys\nfrom {name} import times\ntimes.append(1)\n__all__ = ['VALUE']\nVALUE, _hidden = 5, 6\n"
        f"has_itself = hasattr(sys.modules[__name__], 'later')\nlater = 7\n"
        "def __getattr__(name):\n    if name == 'made':\n        return 8\n    raise AttributeError(name)\n"
    )
    (folder / "broken.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_a_deferred_module_is_executed_once_at_the_first_question(package: str) -> None:
    late, times = _import(package)

    assert [inspect.getmodule(late), hasattr(late, "__wrapped__"), late.__file__ is not None] == [late, False, True]
    assert times == []
    assert (late.VALUE, late.later, late.made, late.has_itself) == (5, 7, 8, False)
    assert not hasattr(late, "other")
    assert times == [1]


def test_all_names_of_a_deferred_module_are_those_that_it_says(package: str) -> None:
    _import(package)
    names: dict[str, Any] = {}

    exec(f"from {package}.late import *", names)

    assert {name for name in names if not name.startswith("__")} == {"VALUE"}


def test_a_deferred_module_that_fails_says_so_each_time(package: str) -> None:
    _import(package)

    for _ in range(2):
        with pytest.raises(ImportError, match="no such library"):
            _ = sys.modules[f"{package}.broken"].anything


def _import(package: str) -> tuple[ModuleType, list[int]]:
    import_without(package, [f"{package}.late", f"{package}.broken"])
    return sys.modules[f"{package}.late"], sys.modules[package].times


def run(script: str, *arguments: str) -> Any:
    """What a script says in a process of its own, in which nobody has imported torch."""
    command = [sys.executable, "-W", "ignore", "-c", DEFERRED + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
