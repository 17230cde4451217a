"""One run from start to report, against a fake server in a process of its own."""

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import RecordsInvalid, ScenarioInvalid, TraceInvalid
from penstock_loadtest.fake.behaviour import Behaviour, Fault, Replicas
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.results.records import read_records
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario, Sessions, Trace
from penstock_loadtest.studies import measure as measuring
from penstock_loadtest.studies.measure import measure

QUICK = Behaviour(
    ttft_s=Lengths(constant=0.005), gap_s=Lengths(constant=0.001), replicas=[Replicas(count=3)], exact=True
)
KIND = Kind(prompts=Prompts(tokens=Lengths(constant=8)), output_tokens=Lengths(constant=4))
LOAD = Scenario(duration_s=0.3, drain_s=5.0, arrivals=Arrivals(process="constant", rate=50), kinds=[KIND], repeat=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server_process(QUICK) as fake:
        yield fake.url


@pytest.fixture
def target(url: str) -> Target:
    return find_destination(LOAD, url, None, {})


def test_a_run_leaves_its_files_and_figures(target: Target, tmp_path: Path) -> None:
    measured = measure(LOAD, target, tmp_path / "run", console=None, plots=False)

    folder = tmp_path / "run"
    records = list(read_records(folder / "records.jsonl"))
    facts = json.loads((folder / "run.json").read_text())
    assert len(records) == measured.summary.requests == facts["sent"] == 15
    assert measured.summary.outcomes.finished == 15
    assert measured.ledger.is_balanced
    assert measured.ledger.requests == 15 + 3
    assert measured.ledger.repeats.compared == 3
    assert measured.ledger.repeats.different == 0
    assert not measured.interrupted
    assert len(list(read_records(folder / "repeats.jsonl"))) == 3
    assert json.loads((folder / "target.json").read_text()) == {"url": target.url, "model": "fake", "exact": True}
    assert json.loads((folder / "scenario.json").read_text())["arrivals"]["rate"] == 50
    observed = json.loads((folder / "observed.jsonl").read_text().splitlines()[0])
    assert observed["replicas"] == {"fake/edge": 3}
    assert {path.name for path in folder.iterdir()} == {
        *(
            "scenario.json",
            "target.json",
            "records.jsonl",
            "repeats.jsonl",
            "observed.jsonl",
            "run.json",
            "summary.json",
            "ledger.json",
        )
    }


def test_the_interpreter_is_as_it_was_afterwards(target: Target, tmp_path: Path) -> None:
    before = gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()

    measure(LOAD, target, tmp_path / "run", console=None, plots=False)

    assert (gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count()) == before


def test_a_run_does_not_write_over_another(target: Target, tmp_path: Path) -> None:
    measure(LOAD, target, tmp_path / "run", console=None, plots=False)

    with pytest.raises(RecordsInvalid, match="holds a run already"):
        measure(LOAD, target, tmp_path / "run", console=None, plots=False)


def test_a_folder_that_cannot_be_made_is_told(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RecordsInvalid, match="can't be written"):
        measure(LOAD, target, tmp_path / "file" / "run", console=None, plots=False)


def test_a_trace_that_cannot_be_read_leaves_no_folder(target: Target, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}\nnonsense\n')
    scenario = Scenario(trace=Trace(format="mooncake", path=trace))

    with pytest.raises(TraceInvalid, match=r"trace\.jsonl, line 2"):
        measure(scenario, target, tmp_path / "run", console=None, plots=False)

    assert not (tmp_path / "run").exists()


def test_a_plan_that_breaks_midway_is_reported_up_to_there(target: Target, tmp_path: Path) -> None:
    rows = [f'{{"timestamp": {n // 8}, "input_length": 4, "output_length": 2, "hash_ids": [{n}]}}' for n in range(1500)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([*rows, "nonsense"]) + "\n")
    scenario = Scenario(trace=Trace(format="mooncake", path=trace), duration_s=None)

    with pytest.raises(TraceInvalid, match="line 1501"):
        measure(scenario, target, tmp_path / "run", console=None, plots=False)

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["requests"] == 1500


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        (
            Scenario(duration_s=0.5, arrivals=Arrivals(process="step", rate=0, to_rate=5, at_s=3)),
            r"Nothing was sent: no request of the scenario is due within duration_s, 0\.5 s",
        ),
        (None, r"Nothing was sent: the first request of .*trace\.jsonl is due after duration_s, 0\.5 s"),
    ],
)
def test_a_run_that_sends_nothing_fails_with_a_sentence(
    target: Target, tmp_path: Path, scenario: Scenario | None, reason: str
) -> None:
    if scenario is None:
        trace = tmp_path / "trace.jsonl"
        lines = (
            f'{{"timestamp": {at_ms}, "input_length": 4, "output_length": 2, "hash_ids": []}}' for at_ms in (0, 9000)
        )
        trace.write_text("\n".join(lines) + "\n")
        scenario = Scenario(trace=Trace(format="mooncake", path=trace, start_s=2.0), duration_s=0.5)

    with pytest.raises(ScenarioInvalid, match=reason):
        measure(scenario, target, tmp_path / "run", console=None, plots=False)

    assert not (tmp_path / "run").exists()


def test_without_matplotlib_plots_are_refused_before_the_load(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "find_spec", lambda _: None)

    with pytest.raises(ScenarioInvalid, match=r"penstock\[loadtest\]"):
        measure(LOAD, target, tmp_path / "run", console=None)

    assert not (tmp_path / "run").exists()


def test_turns_that_never_left_are_told(tmp_path: Path) -> None:
    sessions = Sessions(turns=Lengths(constant=3), think_s=Lengths(constant=0))
    load = msgspec.structs.replace(
        LOAD,
        kinds=[msgspec.structs.replace(KIND, sessions=sessions)],
        arrivals=Arrivals(process="constant", rate=10),
        repeat=0,
    )
    with fake_server_process(msgspec.structs.replace(QUICK, faults=[Fault(kind="status_500", numbers=[0])])) as fake:
        measured = measure(
            load, find_destination(load, fake.url, None, {}), tmp_path / "run", console=None, plots=False
        )

    assert measured.turns_not_sent == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["turns_not_sent"] == 2
