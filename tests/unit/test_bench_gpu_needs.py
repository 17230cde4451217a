"""What a GPU's check refuses with a sentence and status 2, before anything is measured: what it needs is not there, is
too old, or does not fit together."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.gpu import __main__ as entry
from bench.gpu import plan, probe, versions, wheels
from bench.gpu.command import about as about_record
from bench.gpu.command import main, parse
from bench.gpu.environment import cache_folder, surrounding
from bench.support.cpu import is_alive

ROOT = Path(__file__).resolve().parents[2]
PROJECT = versions.pyproject(ROOT)


def make_wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on standard error, with status 2 and nothing on standard output."""
    assert main(["--check", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("bench.gpu: ")
    assert len(said.err.splitlines()) == 1
    return said.err


@pytest.fixture
def needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of wheels names msgspec, which is installed here, and no_such_thing, which is not."""
    (tmp_path / "wheels.txt").write_text("msgspec\nno_such_thing\n")
    monkeypatch.setattr(wheels, "LIST", tmp_path / "wheels.txt")


def test_a_folder_of_wheels_that_is_not_there_or_is_for_another_python_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no folder" in refused(capsys, "--wheels", str(tmp_path / "absent"))
    make_wheel(tmp_path / "other", "a", "1", tag="cp39-cp39-manylinux2014_x86_64")
    (tmp_path / "other" / "odd.whl").touch()
    assert "has no wheel for Python" in refused(capsys, "--wheels", str(tmp_path / "other"))


def test_a_file_that_is_no_whole_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_wheel(tmp_path, "no_such_thing", "1")
    path.write_bytes(path.read_bytes()[:30])

    assert "no_such_thing-1-py3-none-any.whl is no whole wheel" in refused(capsys, "--wheels", str(tmp_path))


@pytest.mark.usefixtures("needs_a_package")
def test_a_listed_package_that_is_neither_installed_nor_a_wheel_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(tmp_path / "wheels", "another", "1")

    assert "has no no_such_thing; `make gpu-wheels" in refused(capsys)
    assert f"has no no_such_thing, nor has {tmp_path / 'wheels'} their wheels" in refused(
        capsys, "--wheels", str(tmp_path / "wheels")
    )


@pytest.mark.usefixtures("needs_a_package")
def test_an_installed_package_that_is_too_old_for_another_gives_way_to_the_folders_wheel_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, record = tmp_path / "wheels", tmp_path / "gpu.json"
    make_wheel(folder, "no_such_thing", "1", "msgspec>=999", "absent>=1", "msgspec<1; extra == 'x'")

    said = refused(capsys, "--wheels", str(folder))
    assert "is there, and no_such_thing needs msgspec>=999" in said
    assert "absent" not in said

    make_wheel(folder, "msgspec", "999")
    assert main(["--check", "--wheels", str(folder), "--record", str(record), "--only", "machine"]) == 0
    assert json.loads(record.read_text())["wheels"] == [
        "no_such_thing-1-py3-none-any.whl",
        "msgspec-999-py3-none-any.whl",
    ]


def test_what_penstock_needs_of_a_package_is_held_against_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path, "opentelemetry_api", "1.2.0")) as archive:
        archive.extractall(tmp_path)
    with zipfile.ZipFile(make_wheel(tmp_path, "msgspec", "0.1")) as archive:
        archive.extractall(tmp_path)

    found = versions.conflicts(
        ["msgspec", "opentelemetry-sdk"], versions.ranges(PROJECT, ["msgspec"]), [str(tmp_path), *sys.path]
    )

    assert [(conflict.name, conflict.version, conflict.by) for conflict in found] == [
        ("msgspec", "0.1", "Penstock"), ("opentelemetry-api", "1.2.0", "opentelemetry-sdk"),
    ]  # fmt: skip


def test_a_record_that_cannot_be_written_is_refused_before_a_step_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    assert main(["--check", "--only", "machine", "--record", str(tmp_path / "file" / "gpu.json")]) == 2
    said = capsys.readouterr()
    assert "File exists" in said.err
    assert "machine" not in said.out


def test_the_reason_why_torch_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "triton.py").write_text("raise SystemError('the driver is broken')")

    absent = probe.ask(sys.executable, ROOT, {"PYTHONPATH": str(tmp_path)})
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is broken')")
    broken = probe.ask(sys.executable, ROOT, {"PYTHONPATH": str(tmp_path)})

    assert "SystemError: the driver is broken" in absent["error"]
    assert "RuntimeError: torch is broken" in broken["error"]
    (tmp_path / "triton.py").write_text("__version__ = '3.6.0'")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert (
        "torch can't be imported: libcudart.so.13"
        in probe.ask(sys.executable, ROOT, {"PYTHONPATH": str(tmp_path)})["error"]
    )
    assert "can't be started" in probe.ask(str(tmp_path / "python"), ROOT, {})["error"]


@pytest.mark.parametrize(
    ("torch", "triton", "gpu", "expected"),
    [
        ("2.10.1+cu128", "3.6.0", "H100", "This needs torch 2.11 or newer, and torch 2.10.1+cu128 is installed."),
        (
            "2.11.0a0+5228986c39.nv26.01",
            "3.5.1",
            "H100",
            "This needs triton 3.6 or newer, and triton 3.5.1 is installed.",
        ),
        ("2.11.0", "3.6.0", None, probe.NO_GPU),
        ("2.11.0a0+5228986c39.nv26.01", "3.6.0", "H100", None),
        ("10.0", "4.0", "H100", None),
    ],
)
def test_versions_are_compared_as_numbers(torch: str, triton: str, gpu: str | None, expected: str | None) -> None:
    found = {"python": "3.12.1", "torch": torch, "triton": triton, "gpu": gpu}

    assert probe.refusal(found, is_check=False) == expected


def test_the_least_versions_are_those_of_pyproject() -> None:
    least = {name: f">={major}.{minor}" for name, (major, minor) in probe.LEAST.items()}

    assert {each.name: str(each.specifier) for each in versions.ranges(PROJECT, least)} == least
    assert f'requires-python = ">={entry.OLDEST[0]}.{entry.OLDEST[1]}"' in PROJECT
    assert entry.refusal((3, 11, 0)) is None
    assert "needs Python 3.11 or newer" in (entry.refusal((3, 10, 13)) or "")


def test_the_platforms_step_needs_what_the_platform_depends_on_in_these_versions() -> None:
    dependencies = [str(each) for each in versions.project_requirements(PROJECT)]
    (platform,) = plan.with_dependencies(plan.select(plan.STEPS, ["tests: platform"]), dependencies)

    assert {"uvicorn>=0.34", "redis>=6", "ray[serve]<2.61,>=2.60", "openai"} <= set(platform.needs)
    look_up = versions.installed(sys.path)
    assert all(versions.has(needed, look_up) for needed in platform.needs)
    assert not versions.has("ray>=999", look_up)
    assert not versions.has("no-such-thing", look_up)
    (machine,) = plan.with_dependencies(plan.select(plan.STEPS, ["machine"]), dependencies)
    assert machine.needs == ()


def test_what_is_compiled_lies_beside_the_record_or_in_a_temporary_folder_and_home_is_not_needed(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "own"
    folder.mkdir()

    cache = cache_folder(tmp_path / "gpu.json", folder, is_check=False)
    environment = surrounding(folder, folder / "site", cache, is_check=False)

    assert cache == tmp_path / "gpu.cache"
    assert cache.is_dir()
    names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    assert all(Path(environment[name]).is_relative_to(cache) for name in names)
    assert Path(environment["TMPDIR"]).is_relative_to(folder)
    for record in (tmp_path / "file" / "gpu.json", None):
        assert cache_folder(record, folder, is_check=False) == folder / "cache"


def test_a_record_is_of_one_python_one_torch_and_one_triton(tmp_path: Path) -> None:
    machine = {"gpu": "H100", "python": "3.12.1", "torch": "2.11.0", "triton": "3.6.0", "multiprocessors": 132}

    identities = [
        about_record(parse(["--check"]), machine | changes, tmp_path, [])["identity"]
        for changes in ({}, {"python": "3.12.2"}, {"triton": "3.7.0"}, {"torch": "2.12.0"}, {"multiprocessors": 1})
    ]

    assert [identity == identities[0] for identity in identities] == [True, False, False, False, True]


def test_a_package_that_installs_a_top_level_tests_is_not_taken_for_ours(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "tests" / "gpu").mkdir(parents=True)
    for place in (site / "tests", site / "tests" / "gpu"):
        (place / "__init__.py").write_text("raise ImportError('this is an impostor')")
    environment = surrounding(tmp_path, site, tmp_path / "cache", is_check=True)
    rows = tmp_path / "rows"

    for module, arguments in (("machine", ()), ("suite", ("tests/gpu/test_loading.py",))):
        command = [sys.executable, "-m", "bench.gpu.step", module, "--rows", str(rows), "--check", "--", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 0, done.stdout + done.stderr

    assert '"tests/gpu/test_loading.py: tests that pass", "ours": 1' in rows.read_text()


def start_step(folder: Path, launcher: str) -> tuple["subprocess.Popen[str]", int]:
    """A process that has started a step, which waits for ever because nobody reads its rows; and the step's id."""
    rows = folder / "rows"
    os.mkfifo(rows)
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, str(rows)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


LAUNCHER = """
import os, subprocess, sys
command = [sys.executable, "-m", "bench.gpu.step", "machine", "--parent", str(os.getpid()), "--rows", sys.argv[1]]
process = subprocess.Popen([*command, "--check", "--"], stderr=subprocess.DEVNULL)
print(process.pid, flush=True)
process.wait()
"""


def test_a_step_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    process, step = start_step(tmp_path, LAUNCHER)
    try:
        wait_until(lambda: "torch" in Path(f"/proc/{step}/maps").read_text())
        process.kill()

        wait_until(lambda: not is_alive(step))
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def _hang_ups_end() -> Iterator[None]:
    """Children are ended by SIGHUP, also where this process was started by nohup, which they would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hang_ups_end")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_lost_connection_ends_the_step_and_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "temporary").mkdir()
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--check",
        "--record",
        str(tmp_path / "gpu.json"),
        "--only",
        "copy bandwidth",
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().endswith(" ...\n"):
        assert process.poll() is None

    process.send_signal(number)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert said == "bench.gpu: interrupted; the record has what was found, and the same command goes on\n"
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not [path for path in Path("/proc").glob("[0-9]*") if str(tmp_path).encode() in environment_of(path)]


def environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
