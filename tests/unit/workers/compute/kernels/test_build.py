import importlib.util
import logging
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base import native
from penstock.base.native import BuildFailed, Compiler, find_compilers
from penstock.workers.compute.kernels import build
from penstock.workers.compute.kernels.build import load_kernels, obtain
from penstock.workers.compute.kernels.library import ABI, Library
from penstock.workers.compute.kernels.matmul import Level

ZIG = Compiler((sys.executable, "-m", "ziglang", "cc", "-x", "c++"))


LEVEL = Level.AMX
"""Level that the library of these tests reports."""


def script(path: Path, body: str) -> Compiler:
    """A compiler that runs `body`, a script."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Compiler((str(path),))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    compilers = find_compilers()
    if not compilers:
        pytest.skip("there is no C++ compiler on this machine, and no ziglang")
    return compilers[0]


@pytest.fixture(scope="module", autouse=True)
def quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is tested is what becomes of a build, a dozen times: of the kernels' functions it makes a library whose
    functions do nothing."""
    exported = re.findall(
        r"^\w+ (penstock_\w+)\(", "".join(source.read_text() for source in build.SOURCES), re.MULTILINE
    )
    folder = tmp_path_factory.mktemp("sources")
    bodies = {"penstock_kernels_abi": f"return {ABI};", "penstock_level": f"return {LEVEL};"}
    for name in exported:
        (folder / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ {bodies.get(name, "return 0;")} }}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", tuple(sorted(folder.glob("*.cpp"))))
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path_factory.mktemp("zig")))
        yield


@pytest.fixture(scope="module")
def built(compiler: Compiler, quickly: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with one library in it."""
    folder = tmp_path_factory.mktemp("kernels")
    obtain([compiler], folder)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


def library_in(folder: Path) -> Path:
    [path] = folder.glob("*.so")
    return path


def works(library: Library) -> bool:
    return library.matmul.level() is LEVEL


def test_a_build_leaves_one_library_and_is_not_repeated(compiler: Compiler, cache: Path) -> None:
    path = library_in(cache)
    before = path.stat()
    library = obtain([compiler], cache)

    assert works(library)
    assert library.path == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {entry.suffix for entry in cache.iterdir()} == {".so", ".lock"}


def test_ziglang_builds_where_there_is_no_system_compiler(tmp_path: Path) -> None:
    assert ZIG in find_compilers()
    assert works(obtain([ZIG], tmp_path))
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".so", ".lock"}


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_broken_cached_library_is_built_again(compiler: Compiler, cache: Path, damage: bytes | None) -> None:
    path = library_in(cache)
    whole = path.read_bytes()
    path.unlink()  # its pages may be mapped by a library loaded from there
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)

    assert works(obtain([compiler], cache))
    assert len(path.read_bytes()) == len(whole)


def test_a_whole_file_that_does_not_load_is_built_again(compiler: Compiler, cache: Path) -> None:
    path = library_in(cache)
    path.unlink()
    path.write_bytes(b"sealed, but no library" + native._seal(b"sealed, but no library"))

    assert works(obtain([compiler], cache))


def test_another_compiler_gives_another_library(compiler: Compiler, cache: Path, tmp_path: Path) -> None:
    wrapped = script(tmp_path / "wrapped", f'exec {" ".join(compiler.command)} "$@"')
    obtain([wrapped], cache)

    assert len(list(cache.glob("*.so"))) == 2


def test_a_compiler_that_fails_gives_way_to_the_next(compiler: Compiler, cache: Path, tmp_path: Path) -> None:
    failing = script(tmp_path / "failing", "echo 'fatal error: no headers here' >&2; exit 1")

    assert works(obtain([failing, compiler], cache))


def test_compilers_that_all_fail_are_named_with_their_complaints(tmp_path: Path) -> None:
    failing = script(tmp_path / "failing", "echo note >&2; echo 'fatal error: no headers here' >&2; exit 1")
    silent = script(tmp_path / "silent", "exit 3")
    useless = script(
        tmp_path / "useless", 'while [ "$1" != -o ]; do [ $# -gt 0 ] || exit 0; shift; done; echo text > "$2"'
    )
    missing = Compiler((str(tmp_path / "missing"),))

    with pytest.raises(BuildFailed) as caught:
        obtain([failing, silent, useless, missing], tmp_path / "cache")
    for part in ("failing: fatal error: no headers here", "silent: it ended with status 3", "useless: ", "missing: "):
        assert part in str(caught.value)


def test_without_any_compiler_the_reason_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="ziglang is not installed"):
        obtain([], tmp_path)


def test_a_library_of_another_abi_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    source, made = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text('extern "C" int penstock_kernels_abi() { return 999; }')
    subprocess.run([*compiler.command, "-O3", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)

    with pytest.raises(OSError, match="not a kernel library of ABI"):
        Library(made)


def test_a_cache_folder_that_cannot_be_costs_a_build_each_time(compiler: Compiler, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    library = obtain([compiler], in_the_way / "kernels")

    assert works(library)
    assert not library.path.exists()


def test_two_that_start_at_once_compile_once(compiler: Compiler, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    counting = script(tmp_path / "counting", f'echo "$@" >> {log}; exec {" ".join(compiler.command)} "$@"')
    libraries: list[Library] = []
    threads = [
        threading.Thread(target=lambda: libraries.append(obtain([counting], tmp_path / "cache"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [works(library) for library in libraries] == [True, True, True]
    assert sum("-shared" in call for call in log.read_text().splitlines()) == 1


def test_the_module_builds_and_says_where(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert build.main([]) == 0
    assert Path(capsys.readouterr().out.strip()) == library_in(tmp_path / "penstock" / "kernels")


def test_the_module_runs_as_a_program() -> None:
    """Build with the user's cache folder, which has the library as a rule."""
    command = [sys.executable, "-W", "error", "-m", "penstock.workers.compute.kernels.build"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.strip()).is_relative_to(build.cache_folder())


def test_where_nothing_can_be_built_one_sentence_says_that_it_is_slow_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = script(tmp_path / "c++", "echo 'error: licence expired' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            results = [load_kernels(), load_kernels()]
    finally:
        load_kernels.cache_clear()

    assert results == [None, None]
    assert broken.name == "c++"
    [record] = caplog.records
    assert "slow" in record.getMessage()
    assert "c++: error: licence expired" in record.getMessage()
