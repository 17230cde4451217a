"""What a GPU's check needs to be installed: the list of small wheels, which of them are unpacked, and that no step
imports anything else."""

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.gpu import fetch, wheels

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ("torch", "triton", "pytest")
"""Distributions that are there without the wheels, with what they need themselves."""
STEPS = sorted(f"bench.gpu.steps.{path.stem}" for path in (ROOT / "bench/gpu/steps").glob("[a-z]*.py"))
TESTS = sorted(
    f"tests.gpu.{path.stem}" for path in (ROOT / "tests/gpu").glob("test_*.py") if path.stem != "test_platform"
)
IMPORT = """
import json, sys
allowed, modules = json.loads(sys.argv[1])

class Refuse:
    def find_spec(self, name, path=None, target=None):
        # the standard library's, though its list does not name it
        if name.partition(".")[0] not in allowed and not name.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"{name} is not in wheels.txt", name=name)

sys.meta_path.insert(0, Refuse())
import importlib
for module in modules:
    importlib.import_module(module)
"""


def listed() -> list[str]:
    return wheels.listed(wheels.LIST.read_text(encoding="utf-8"))


def closure(names: Iterable[str]) -> set[str]:
    """Normal names of these distributions and of all that they need."""
    found: set[str] = set()
    waiting = [wheels.normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or not wheels.is_installed(name):
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(wheels.normal(needed.name))
    return found


def refused_import(modules: list[str], names: Iterable[str]) -> str:
    """What a process says that imports these, where only the standard library and these distributions are there."""
    there = {
        Path(file).parts[0].partition(".")[0]
        for name in names
        if wheels.is_installed(name)
        for file in importlib.metadata.files(name) or ()
    }
    allowed = sorted({*sys.stdlib_module_names, "penstock", "bench", "tests", *there})
    path = os.pathsep.join([str(ROOT / ".src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT, json.dumps([allowed, modules])],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1)
    return done.stderr


def test_no_step_and_no_test_of_the_gpu_imports_more_than_torch_triton_pytest_and_the_listed_wheels() -> None:
    assert len(STEPS) > 12
    assert len(TESTS) > 6
    assert refused_import([*STEPS, *TESTS], {*closure(ENVIRONMENT), *listed()}) == ""


def test_an_import_of_what_is_not_listed_would_be_found() -> None:
    without = [name for name in listed() if name != "msgspec"]

    said = refused_import(["bench.gpu.steps.engines"], {*closure(ENVIRONMENT), *without})

    assert "msgspec is not in wheels.txt" in said


def packed_bytes(name: str) -> int:
    """Bytes of the installed distribution as a wheel compresses it, but for what is no part of one: bytecode and
    scripts."""
    files = [file for file in importlib.metadata.files(name) or () if file.suffix != ".pyc" and ".." not in file.parts]
    return sum(len(zlib.compress(Path(str(file.locate())).read_bytes())) for file in files)


def test_the_wheels_are_small_together() -> None:
    sizes = {name: packed_bytes(name) for name in listed()}

    assert min(sizes.values()) > 2**10
    assert sizes["numpy"] > 8 * 2**20
    assert sum(sizes.values()) < wheels.MAX_BYTES == 30 * 2**20, sizes


def test_every_listed_package_is_pinned_and_none_is_a_server_or_torch() -> None:
    pinned = wheels.pins(listed(), (ROOT / "constraints.txt").read_text(encoding="utf-8"))

    assert len(pinned) == len(set(pinned)) == len(listed())
    assert not {"ray", "redis", "openai", "transformers", "torch", "triton"} & set(listed())
    with pytest.raises(ValueError, match="pins no absent-package"):
        wheels.pins(["absent-package"], "msgspec==1\n")


def test_pip_is_asked_for_these_alone_in_binary_for_the_other_python() -> None:
    command = fetch.command(["msgspec==0.22.0"], Path("folder"), "3.12", "x86_64")

    assert command[-1] == "msgspec==0.22.0"
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_28_x86_64", "manylinux2014_x86_64"} <= set(command)
    assert command[command.index("--python-version") + 1] == "3.12"


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_28_x86_64.whl", True),
        ("a-1-py3-none-manylinux_2_31_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp313-abi3-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp312-cp312-manylinux_2_17_aarch64.whl", False),
        ("a-1-cp312-cp312-macosx_11_0_arm64.whl", False),
        ("a-1-cp312-cp312t-manylinux_2_17_x86_64.whl", False),
    ],
)
def test_a_wheel_fits_by_its_tags(name: str, does: bool) -> None:
    assert wheels.fits(Path(name), (3, 12), "x86_64") is does


def make_wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for place, text in files.items():
            archive.writestr(place, text)
        archive.writestr(f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")


def test_what_is_not_installed_is_unpacked_and_what_is_stays_as_it_is(tmp_path: Path) -> None:
    make_wheel(tmp_path, "no_such_thing", {"thing/__init__.py": "", "no_such_thing-1.data/purelib/more.py": "1",
                                           "no_such_thing-1.data/scripts/run": "#"})  # fmt: skip
    make_wheel(tmp_path, "pytest", {"pytest/__init__.py": "raise SystemExit"})
    site = tmp_path / "site"

    assert wheels.unpack_missing(tmp_path, site) == ["no_such_thing-1-py3-none-any.whl"]

    assert sorted(str(path.relative_to(site)) for path in site.rglob("*.py")) == ["more.py", "thing/__init__.py"]
    assert not list(site.rglob("run"))
    assert wheels.is_installed("no-such-thing", [site])
    assert not wheels.is_installed("no-such-thing")
    assert wheels.versions(["no-such-thing", "nothing"], [site]) == {"no-such-thing": "1"}


def test_two_wheels_of_one_package_are_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path, "no_such_thing", {})
    (tmp_path / "no_such_thing-1-py3-none-any.whl").rename(tmp_path / "no_such_thing-0-py3-none-any.whl")
    make_wheel(tmp_path, "no_such_thing", {})

    with pytest.raises(ValueError, match="two wheels of no-such-thing"):
        wheels.unpack_missing(tmp_path, tmp_path / "site")
