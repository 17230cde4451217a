import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.base.native import cache_folder, find_compilers
from penstock.prefix.native import build
from penstock.prefix.native.build import LIBRARY, load_library
from penstock.prefix.native.library import ABI, Library
from penstock.prefix.native_index import NativeIndex, open_index
from penstock.prefix.plain_index import PlainIndex
from penstock.wire.frames import BlockEvents


def test_without_a_compiler_the_index_is_kept_in_python_and_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            indexes = [open_index(), open_index()]
    finally:
        load_library.cache_clear()

    assert [type(index) for index in indexes] == [PlainIndex, PlainIndex]
    [record] = caplog.records
    assert "there is no C++ compiler" in record.getMessage()


def test_what_is_built_ahead_works(tmp_path: Path) -> None:
    path = LIBRARY.build_ahead(tmp_path / "prebuilt" / "x86_64.so")
    if path is None:
        pytest.skip("this machine is no x86-64")
    index = NativeIndex(Library(path))
    index.apply("a", "e", BlockEvents(0, b"k" * 16, is_snapshot=True))

    assert index.lookup([b"k" * 16, b"l" * 16], 0.0) == {"a": 1}


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    compilers = find_compilers()
    if not compilers:
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    source, made = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(f'extern "C" int penstock_mirror_abi() {{ return {ABI + 1}; }}')
    subprocess.run([*compilers[0].command, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)

    with pytest.raises(OSError, match="not a library of the mirror's ABI"):
        Library(made)


def test_a_checkout_has_none_that_was_built_ahead() -> None:
    assert not build.AHEAD.exists()


def test_the_module_runs_as_a_program_and_needs_no_torch() -> None:
    program = (
        "import sys; from penstock.prefix.native import build; status = build.main([]);"
        " sys.exit(status or 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.strip()).is_relative_to(cache_folder("prefix"))
