import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.native import cache_folder, find_compilers
from penstock.router.routing.native import build
from penstock.router.routing.native.build import LIBRARY, load_library
from penstock.router.routing.native.library import ABI, Library
from penstock.router.routing.native_search import NativeSearch, open_search
from penstock.router.routing.search import IN_ARRAYS


def test_without_a_compiler_replicas_are_compared_in_arrays_and_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            found = [open_search(), open_search()]
    finally:
        load_library.cache_clear()

    assert found == [IN_ARRAYS, IN_ARRAYS]
    [record] = caplog.records
    assert "there is no C++ compiler" in record.getMessage()


def test_what_is_built_ahead_loads(tmp_path: Path) -> None:
    path = LIBRARY.build_ahead(tmp_path / "prebuilt" / "x86_64.so")
    if path is None:
        pytest.skip("this machine is no x86-64")

    assert NativeSearch(Library(path))


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    compilers = find_compilers()
    if not compilers:
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    source, made = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(f'extern "C" int penstock_choice_abi() {{ return {ABI + 1}; }}')
    subprocess.run([*compilers[0].command, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)

    with pytest.raises(OSError, match="not a library of the choice's ABI"):
        Library(made)


def test_a_checkout_has_none_that_was_built_ahead() -> None:
    assert not build.AHEAD.exists()


def test_the_module_runs_as_a_program_and_needs_no_torch() -> None:
    program = (
        "import sys; from penstock.router.routing.native import build; status = build.main([]);"
        " sys.exit(status or 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.strip()).is_relative_to(cache_folder("choice"))
