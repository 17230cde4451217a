"""bench.support.report: the table and the file that every benchmark leaves."""

import json
from pathlib import Path

import pytest

from bench.support.report import Row, write_report


def test_a_report_says_where_and_how_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("cpu of an [answer]", 1.5, 3.0, "ms"), Row("fixed", None, None, "ms")]

    path = write_report("some-thing", rows, notes=["[idle] 2 ms"], folder=tmp_path)

    report = json.loads(path.read_text())
    assert path.name == "some-thing.json"
    assert report["rows"][0] == {"name": "cpu of an [answer]", "ours": 1.5, "rival": 3.0, "ratio": 0.5, "unit": "ms"}
    assert report["rows"][1]["ratio"] is None
    assert report["command"].startswith("python -m bench.some_thing")
    assert {"cpu", "cores", "memory_gib"} <= report["hardware"].keys()
    assert report["commit"]
    printed = capsys.readouterr().out
    assert "cpu of an [answer]" in printed
    assert "[idle] 2 ms" in printed


def test_a_variant_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = write_report("some-thing", [], variant="avx2", folder=tmp_path)

    assert path.name == "some-thing_avx2.json"
    assert json.loads(path.read_text())["name"] == "some-thing"


def test_a_rival_of_zero_has_no_ratio() -> None:
    assert Row("x", 1.0, 0.0, "ms").ratio is None


def test_a_command_is_reported_without_this_machines_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--rival", str(tmp_path / "bin" / "python"), "--rounds=3"])

    report = json.loads(write_report("some-thing", [], folder=tmp_path).read_text())

    assert report["command"] == "python -m bench.some_thing --rival python --rounds=3"
