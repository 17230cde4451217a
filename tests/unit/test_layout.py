"""The shape of the repository that packaging and imports rest on."""

import ast
import importlib.util
import platform
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".yaml", ".txt", ".cpp", ".h", ".c", ".json", ""}


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_the_package_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert platform.python_version()


def test_penstock_resolves_to_the_platform_folder_alone() -> None:
    spec = importlib.util.find_spec("penstock")

    assert spec is not None
    assert spec.origin is None, "a namespace package has no __init__"
    assert {Path(place).resolve() for place in spec.submodule_search_locations or ()} == {ROOT / "platform"}


def test_every_package_says_in_two_to_five_lines_what_it_is_and_nothing_else() -> None:
    roots = [path for tree in ("platform", "loadtest") for path in (ROOT / tree).rglob("__init__.py")]

    assert len(roots) > 30
    for path in roots:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree)
        assert text is not None, path
        assert len(tree.body) == 1, path
        assert 2 <= len(text.splitlines()) <= 5, path


def test_the_load_tester_resolves_to_its_folder_alone() -> None:
    spec = importlib.util.find_spec("penstock_loadtest")

    assert spec is not None
    assert {Path(place).resolve() for place in spec.submodule_search_locations or ()} == {ROOT / "loadtest"}


def test_the_source_links_are_relative() -> None:
    assert (ROOT / ".src" / "penstock").readlink() == Path("../platform")
    assert (ROOT / ".src" / "penstock_loadtest").readlink() == Path("../loadtest")


def test_the_layer_contract_names_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {
        name.strip().removeprefix("penstock.")
        for layer in settings["tool"]["importlinter"]["contracts"][0]["layers"]
        for name in layer.split("|")
    }

    assert named == {
        path.name for path in (ROOT / "platform").iterdir() if path.is_dir() and path.name != "__pycache__"
    }


def test_triton_is_imported_only_by_the_gpus_kernels_and_those_only_where_a_gpu_computes() -> None:
    kernels = {
        f"penstock.workers.compute.triton.{name}"
        for name in (
            *("early", "glue", "low_rank"),
            *(f"attention.{name}" for name in ("store", "tile", "decode", "prefill", "attend")),
            *(f"products.{name}" for name in ("matmul", "scale_rows")),
            *(f"sampling.{name}" for name in ("adjust", "cut", "exact", "sample")),
        )
    }
    kernels.add("penstock.workers.compute.models.gpu_operators")
    importers = set()
    for path in (ROOT / "platform").rglob("*.py"):
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
        if names & kernels or any(name.split(".")[0] == "triton" for name in names):
            importers.add("penstock." + str(path.relative_to(ROOT / "platform").with_suffix("")).replace("/", "."))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert importers == kernels
    assert not any(need.startswith("triton") for need in project["project"]["dependencies"])
    assert any(need.startswith("triton") for need in project["dependency-groups"]["dev"])


def test_no_tracked_file_names_a_place_on_someones_machine() -> None:
    machine = re.compile(rf"{re.escape(str(ROOT))}|/(?:home|Users|root|work)/[a-z]")
    offenders = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in tracked_files()
        if path.suffix in TEXT and path.is_file() and not path.is_symlink() and path != Path(__file__)
        for found in [machine.search(path.read_text(encoding="utf-8", errors="replace"))]
        if found
    ]

    assert offenders == []


def test_only_the_ci_entry_point_names_the_shared_test_data() -> None:
    named = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.is_file() and path.suffix in TEXT and "../shared" in path.read_text(encoding="utf-8", errors="replace")
    ]

    assert set(named) <= {".ci/run", "tests/unit/test_layout.py"}
