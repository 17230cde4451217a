"""Folders of several runs: begun, gone on with, refused."""

from pathlib import Path

import pytest

from penstock_loadtest.errors import RecordsInvalid, ScenarioInvalid
from penstock_loadtest.results.knee import Ladder, Rules, make_ladder
from penstock_loadtest.results.records import write_json
from penstock_loadtest.scenario import Arrivals, Kind, Scenario, Trace
from penstock_loadtest.studies.campaign import encode_settings, must_be_same, new_folder, read_if_there


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    ladder = make_ladder(
        "http://x/v1",
        "m",
        "requests/s",
        Rules(start_rate=1, max_rate=8),
        encode_settings(Scenario(), pace={"step_s": 1}),
        [],
    )
    write_json(tmp_path / "ladder.json", ladder)

    assert read_if_there(tmp_path / "ladder.json", Ladder) == ladder
    assert read_if_there(tmp_path / "another.json", Ladder) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"url": 3}', "\xff"])
def test_a_file_that_is_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "ladder.json").write_text(text, encoding="latin-1")

    with pytest.raises(RecordsInvalid, match=r"ladder\.json can't be read"):
        read_if_there(tmp_path / "ladder.json", Ladder)


def test_a_setting_that_differs_is_named() -> None:
    found, wanted = (encode_settings(Scenario(arrivals=Arrivals(process="gamma", cv=cv))) for cv in (1.0, 2.0))

    must_be_same(Path("ladder.json"), found, found)
    with pytest.raises(ScenarioInvalid, match=r"scenario\.arrivals\.cv was 1\.0, now 2\.0"):
        must_be_same(Path("ladder.json"), found, wanted)


def test_a_setting_in_a_list_is_named_by_its_place() -> None:
    found, wanted = (
        encode_settings(Scenario(kinds=[Kind(name="a"), Kind(name="b", stream=stream)])) for stream in (True, False)
    )

    with pytest.raises(ScenarioInvalid, match=r"scenario\.kinds\.1\.stream was True, now False"):
        must_be_same(Path("ladder.json"), found, wanted)


def test_a_setting_that_one_side_lacks_differs() -> None:
    with pytest.raises(ScenarioInvalid, match="direct was None, now x"):
        must_be_same(Path("ladder.json"), {}, {"direct": "x"})


def test_a_trace_without_an_end_is_a_setting_like_any_other(tmp_path: Path) -> None:
    settings = encode_settings(Scenario(trace=Trace(format="azure", path=tmp_path / "trace.csv"), duration_s=None))

    must_be_same(Path("ladder.json"), settings, settings)
    assert str(tmp_path) in str(settings)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = new_folder(tmp_path, "step-01")
        folder.mkdir()
        names.append(folder.name)

    assert names == ["step-01", "step-01-2", "step-01-3"]
