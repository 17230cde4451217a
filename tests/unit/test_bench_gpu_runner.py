"""The runner of a GPU's check, with steps that fail in every way, and the record that is continued."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.gpu.plan import Step
from bench.gpu.record import Record, StepResult, digest_of_sources, open_record
from bench.gpu.runner import LEAST_S, RESERVE_S, Surroundings, run_steps
from bench.support.cpu import is_alive

STEP = """
import json, os, subprocess, sys, time
from pathlib import Path

module, rows = sys.argv[1], Path(sys.argv[sys.argv.index("--rows") + 1])
arguments = sys.argv[sys.argv.index("--") + 1 :]

def add(name):
    with rows.open("a") as file:
        file.write(json.dumps({"name": name, "ours": 1.0, "rival": None, "unit": "", "ratio": None}) + "\\n")

add(f"{module} has begun")
if module == "fails":
    print("something is wrong here")
    sys.exit(1)
if module == "crashes":
    os.abort()
if module == "hangs":
    add(subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)
if module == "escapes":
    # a process in a session of its own, and another whose parent has ended
    add(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=2, start_new_session=True).pid)"
    add(int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout))
    time.sleep(600 if arguments else 0)
if module == "litters":
    (Path(os.environ["TMPDIR"]) / "folder").mkdir()
    (Path(os.environ["TMPDIR"]) / "folder" / "weights").write_text("1")
    os.abort()
if module == "watches":
    until = time.monotonic() + 20
    while "watches has begun" not in Path(arguments[0]).read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
"""
"""A step's process, in place of bench.gpu.step."""
FOREVER = 1e9


@pytest.fixture
def surroundings(tmp_path: Path) -> Surroundings:
    package = tmp_path / "bench" / "gpu"
    package.mkdir(parents=True)
    for place in (package.parent / "__init__.py", package / "__init__.py"):
        place.touch()
    (package / "step.py").write_text(STEP)
    logs = tmp_path / "logs"
    logs.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Surroundings(sys.executable, tmp_path, environment | {"TMPDIR": str(scratch)}, logs, scratch=scratch)


def step(module: str, limit_s: float = 60.0, needs: tuple[str, ...] = (), *arguments: str) -> Step:
    return Step(f"it {module}", "tests", module, arguments, limit_s, needs)


def run(
    steps: list[Step], record: Record, surroundings: Surroundings, left_s: Callable[[], float] = lambda: FOREVER
) -> list[str]:
    """Names of the steps that are left."""
    lines: list[str] = []
    return [
        left.name for left in run_steps(steps, record, surroundings, lambda name: name == "there", left_s, lines.append)
    ]


def notes(record: Record, name: str) -> list[str]:
    return [row.get("note", "") for row in record.steps[name].rows]


def test_a_step_that_fails_crashes_or_hangs_is_a_row_and_the_rest_goes_on(surroundings: Surroundings) -> None:
    record = Record(None, {})
    steps = [step("fails"), step("crashes"), step("hangs", 2.0), step("holds")]

    assert run(steps, record, surroundings) == []

    assert {name: result.status for name, result in record.steps.items()} == {
        "it fails": "failed", "it crashes": "failed", "it hangs": "killed", "it holds": "done",
    }  # fmt: skip
    assert notes(record, "it fails") == ["", "something is wrong here"]
    assert notes(record, "it crashes")[-1] == "killed by SIGABRT"
    assert notes(record, "it hangs")[-1] == "killed after 2 s, its limit"
    assert [row["name"] for row in record.steps["it holds"].rows] == ["holds has begun"]


@pytest.mark.parametrize(
    ("steps", "status", "num_started"),
    [([step("hangs", 6.0), step("escapes", 8.0, (), "and waits")], "killed", 3), ([step("escapes")], "done", 2)],
    ids=["killed", "done"],
)
def test_nothing_that_a_step_has_started_goes_on(
    surroundings: Surroundings, steps: list[Step], status: str, num_started: int
) -> None:
    """Steps that are killed have had time for all that they start."""
    record = Record(None, {})
    bystander = subprocess.Popen(["sleep", "600"])

    run(steps, record, surroundings)

    assert {result.status for result in record.steps.values()} == {status}
    started = [row["name"] for result in record.steps.values() for row in result.rows[1:]]
    pids = [pid for pid in started if isinstance(pid, int)]
    assert len(pids) == num_started
    assert [pid for pid in pids if is_alive(pid)] == []
    assert bystander.poll() is None, "a process of somebody else was ended"
    bystander.kill()
    bystander.wait()


def test_what_a_step_leaves_in_its_temporary_folder_is_removed(surroundings: Surroundings) -> None:
    record = Record(None, {})

    run([step("litters")], record, surroundings)

    assert notes(record, "it litters")[-1] == "killed by SIGABRT"
    assert surroundings.scratch is not None
    assert list(surroundings.scratch.iterdir()) == []


def test_a_missing_package_is_a_row_that_names_it_and_is_looked_for_again_by_the_next_call(
    surroundings: Surroundings,
) -> None:
    record = Record(None, {})

    run([step("holds", 60.0, ("there", "absent", "gone")), step("fails", 60.0, ("there",))], record, surroundings)

    assert record.steps["it holds"].status == "missing"
    assert notes(record, "it holds") == ["not run: absent and gone are not installed"]
    assert record.steps["it fails"].status == "failed"
    run([step("holds", 60.0, ("there",))], record, surroundings)
    assert record.steps["it holds"].status == "done"
    assert notes(record, "it holds") == [""]


def test_a_step_that_fails_is_tried_again_once_after_the_others(surroundings: Surroundings) -> None:
    record, lines = Record(None, {}), list[str]()
    steps = [step("fails"), step("crashes"), step("hangs", 2.0)]

    def call(steps: list[Step]) -> list[str]:
        lines.clear()
        run_steps(steps, record, surroundings, lambda _: True, lambda: FOREVER, lines.append)
        return [line.partition("]")[2] for line in lines if line.endswith((" ...", "already"))]

    assert call(steps) == [" it fails ...", " it crashes ...", " it hangs ..."]
    assert call([*steps, step("holds")]) == [
        " it hangs: killed already", " it holds ...", " it fails ...", " it crashes ...",
    ]  # fmt: skip
    assert {record.steps[name].attempts for name in ("it fails", "it crashes")} == {2}
    assert sorted(call(steps)) == [
        " it crashes: failed already", " it fails: failed already", " it hangs: killed already",
    ]  # fmt: skip


def test_rows_are_in_the_record_while_their_step_still_runs(tmp_path: Path, surroundings: Surroundings) -> None:
    path = tmp_path / "gpu.json"
    record, _ = open_record(path, {"identity": 1})
    record.save()

    run([step("watches", 60.0, (), str(path))], record, surroundings)

    assert record.steps["it watches"].status == "done"


def test_a_budget_ends_between_steps_and_the_next_call_goes_on(tmp_path: Path, surroundings: Surroundings) -> None:
    path = tmp_path / "gpu.json"
    steps = [step("holds"), step("fails"), step("crashes")]
    first, _ = open_record(path, {"identity": 1})

    left = run(steps, first, surroundings, counted_down(100.0, 100.0, LEAST_S - 1))
    assert left == ["it fails", "it crashes"]
    assert list(first.steps) == ["it holds"]

    second, sentence = open_record(path, {"identity": 1})
    assert "1 steps are over" in sentence
    assert run(steps, second, surroundings) == []
    assert second.steps["it holds"] == first.steps["it holds"]
    assert list(second.steps) == ["it holds", "it fails", "it crashes"]


def test_a_step_that_the_budget_ends_before_its_own_limit_is_never_over(surroundings: Surroundings) -> None:
    record = Record(None, {})
    short_s = LEAST_S + 1
    steps = [step("holds"), step("hangs", 60.0)]

    left = run(steps, record, surroundings, counted_down(99.0, 99.0, short_s, RESERVE_S + 1))

    assert left == ["it hangs"]
    assert (record.steps["it hangs"].status, record.steps["it hangs"].attempts) == ("cut", 0)
    assert record.steps["it hangs"].note == (
        "the budget ended it after 1 s of the 60 s that it may take; the next call runs it again"
    )


def test_a_step_that_had_a_whole_budget_gives_way_to_the_others_and_its_note_says_what_is_enough(
    surroundings: Surroundings,
) -> None:
    record = Record(None, {})
    steps = [step("hangs", 60.0), step("holds")]

    assert run(steps, record, surroundings, counted_down(LEAST_S + 1, RESERVE_S + 1, 1.0)) == ["it hangs", "it holds"]
    assert record.steps["it hangs"].status == "cut"
    assert record.steps["it hangs"].note.endswith("after the others: a budget of 63 s is enough")
    assert run(steps, record, surroundings, counted_down(99.0, 99.0, LEAST_S - 1)) == ["it hangs"]
    assert record.steps["it holds"].status == "done"


def counted_down(*seconds: float) -> Callable[[], float]:
    """A clock that shows these, one after the other."""
    shown: Iterator[float] = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    return lambda: next(shown)


def test_a_record_of_other_sources_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    record, _ = open_record(path, {"identity": 1, "commit": "old"})
    record.put("a", StepResult("done", 1.0, "", [{"name": "row", "ours": 2.0}]))

    same, _ = open_record(path, {"identity": 1, "commit": "old"})
    other, sentence = open_record(path, {"identity": 2, "commit": "new"})

    assert same.steps == record.steps
    assert other.steps == {}
    assert "gpu.previous.json" in sentence
    assert json.loads((tmp_path / "gpu.previous.json").read_text())["commit"] == "old"
    assert not path.exists()


def test_records_that_were_set_aside_stay(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    for number in range(4):
        record, _ = open_record(path, {"identity": number})
        record.put("a", StepResult("done", float(number)))

    names = ["gpu.previous.json", "gpu.previous-2.json", "gpu.previous-3.json", "gpu.json"]
    assert [json.loads((tmp_path / name).read_text())["identity"] for name in names] == [0, 1, 2, 3]


def test_a_file_that_is_no_record_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text('{"identity": 1, "rows": [')

    record, _ = open_record(path, {"identity": 1})

    assert record.steps == {}
    assert (tmp_path / "gpu.previous.json").exists()


def test_the_digest_of_the_sources_changes_with_a_name_or_a_byte_and_with_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "platform"
    folder.mkdir()
    (folder / "a.py").write_text("1")
    before = digest_of_sources(tmp_path, ["platform"])

    (folder / "notes.txt").write_text("1")
    assert digest_of_sources(tmp_path, ["platform"]) == before
    (folder / "a.py").write_text("2")
    assert digest_of_sources(tmp_path, ["platform"]) != before
    (folder / "a.py").write_text("1")
    (folder / "a.py").rename(folder / "b.py")
    assert digest_of_sources(tmp_path, ["platform"]) != before
