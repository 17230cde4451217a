"""The scenario in a report, read back."""

from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.report.rerun import dump_scenario
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Scenario, Sessions, Share, Trace, load_scenario
from tests.unit.loadtest.simulated import SCENARIO


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(),
        SCENARIO,
        Scenario(
            loop="closed",
            concurrency=3,
            duration_s=None,
            requests=50,
            cancel=Cancel(share=0.1, after_s=Lengths(choices=[0.5, 1.0])),
        ),
        Scenario(
            trace=Trace(format="azure", path=Path("/traces/azure.csv.gz"), token_scale=0.5, start_s=10.0),
            duration_s=None,
        ),
        Scenario(
            kinds=[Kind(sessions=Sessions(turns=Lengths(uniform=(2, 5))))],
            models=[Share(name="a: b"), Share(name="- c")],
            arrivals=Arrivals(process="ramp", to_rate=9),
        ),
    ],
)
def test_the_scenario_in_the_report_is_read_back_as_the_same(tmp_path: Path, scenario: Scenario) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(dump_scenario(scenario), encoding="utf-8")

    assert load_scenario(path, []) == msgspec.structs.replace(
        scenario, name="scenario" if scenario.name == "load" else scenario.name
    )
