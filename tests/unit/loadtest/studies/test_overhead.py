"""The overhead as a command runs it, with a computed platform and its computed CPU time."""

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.results.cost import Cell, Overhead
from penstock_loadtest.results.cost import Path as Way
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Scenario
from penstock_loadtest.studies.overhead import Load, Meter, describe_fit, make_cost_table, parse_numbers, run_overhead
from tests.unit.loadtest.modelled import Modelled, answered, target

LOAD = Load(lengths=[16, 64, 256], concurrencies=[1, 4], requests=50, prompt_tokens=100, rounds=2)
TARGETS: dict[Way, Target] = {"platform": target("http://p/v1"), "direct": target("http://e/v1")}
WALL_S, IDLE_CORES = 10.0, 0.02


class Platform:
    """Spends 2 ms a request and 30 us a token, 20 ms a second beside; every run takes 10 s. Adds 5 ms to TTFT."""

    def __init__(self) -> None:
        self.now_s = self.spent_s = 0.0
        self.rested: list[float] = []

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.spent_s += IDLE_CORES * seconds

    def rest(self, seconds: float) -> None:
        self.rested.append(seconds)
        self.pass_time(seconds)

    def serve(self, scenario: Scenario, used: Target) -> list[Record]:
        through = used.url == TARGETS["platform"].url
        tokens, count = int(scenario.kinds[0].output_tokens.constant or 0), scenario.requests or 0
        self.pass_time(WALL_S)
        self.spent_s += through * count * (2e-3 + 30e-6 * tokens)
        return [answered(index, index / 10, ttft_s=0.1 + 0.005 * through, tokens=tokens) for index in range(count)]

    @property
    def meter(self) -> Meter:
        return Meter(lambda: self.spent_s, lambda: self.now_s, self.rest)


def measured(
    out: Path, platform: Platform, run: Modelled, *, targets: dict[Way, Target] = TARGETS, load: Load = LOAD
) -> Overhead:
    return run_overhead(targets, load, platform.meter, out, console=None, run=run)


def test_what_the_platform_spends_and_adds_is_found(tmp_path: Path) -> None:
    platform = Platform()
    found = measured(tmp_path, platform, Modelled(platform.serve))
    everything = found.fits[-1]

    assert everything.fixed_ms == pytest.approx(2.0)
    assert everything.per_token_us == pytest.approx(30.0)
    assert {round(line.added_ttft_ms.value or 0, 6) for line in found.lines if line.added_ttft_ms} == {5.0}
    assert len(found.lines) == 6
    assert found.is_complete
    assert msgspec.convert(json.loads((tmp_path / "overhead.json").read_text()), Overhead, strict=False) == found


def test_idle_is_measured_for_as_long_as_the_load_took(tmp_path: Path) -> None:
    platform = Platform()
    found = measured(tmp_path, platform, Modelled(platform.serve))

    assert platform.rested == [WALL_S] * 12
    assert found.lines[0].idle_cores == pytest.approx(IDLE_CORES)


def test_without_an_engine_only_the_platform_is_run(tmp_path: Path) -> None:
    platform = Platform()
    run = Modelled(platform.serve)
    found = measured(tmp_path, platform, run, targets={"platform": TARGETS["platform"]})

    assert {used.url for used in run.targets} == {"http://p/v1"}
    assert found.direct is None
    assert all(line.added_ttft_ms is None for line in found.lines)


def test_a_few_requests_warm_it_up_and_do_not_count(tmp_path: Path) -> None:
    platform = Platform()
    run = Modelled(platform.serve)
    found = measured(tmp_path, platform, run)

    assert run.folders[:2] == ["warm-up-platform", "warm-up-direct"]
    assert [scenario.requests for scenario in run.scenarios[:2]] == [4, 4]
    assert len(found.runs) == len(run.scenarios) - 2 == 24


@pytest.mark.parametrize("stop", ["stop_at", "kill_at"])
def test_a_grid_that_was_stopped_goes_on_with_the_runs_it_has(tmp_path: Path, stop: str) -> None:
    platform = Platform()
    stopped = measured(tmp_path, platform, Modelled(platform.serve, **{stop: 8}))
    rest = Modelled(platform.serve)
    found = measured(tmp_path, platform, rest)

    assert (len(stopped.runs), stopped.is_complete) == (5, False)
    assert len(rest.scenarios) - 2 == 24 - 4, "the one without its neighbour is run again"
    assert found.is_complete
    assert found.fits[-1].per_token_us == pytest.approx(30.0)


def test_a_finished_grid_is_not_run_again_and_can_get_more_rounds(tmp_path: Path) -> None:
    platform = Platform()
    measured(tmp_path, platform, Modelled(platform.serve))
    again, more = Modelled(platform.serve), Modelled(platform.serve)
    measured(tmp_path, platform, again)
    measured(tmp_path, platform, more, load=msgspec.structs.replace(LOAD, rounds=3))

    assert again.scenarios == []
    assert len(more.scenarios) - 2 == 12


def test_another_grid_is_not_joined(tmp_path: Path) -> None:
    platform = Platform()
    measured(tmp_path, platform, Modelled(platform.serve))

    with pytest.raises(ScenarioInvalid, match=r"kinds\.0\.prompts\.tokens\.constant was 100, now 7"):
        measured(tmp_path, platform, Modelled(platform.serve), load=msgspec.structs.replace(LOAD, prompt_tokens=7))


def test_runs_ask_for_answers_of_exactly_the_length_and_never_twice_for_the_same() -> None:
    scenarios = [LOAD.scenario(cell) for cell in LOAD.cells(is_direct_too=True)]

    assert len({scenario.seed for scenario in scenarios}) == len(scenarios)
    for scenario in scenarios:
        assert scenario.loop == "closed"
        assert scenario.kinds[0].ignore_eos
    assert LOAD.scenario(Cell(1, 4, 64, "platform")).requests == 50
    assert msgspec.structs.replace(LOAD, requests=1).scenario(Cell(1, 4, 64, "platform")).requests == 16


def test_numbers_are_read_from_a_list() -> None:
    assert parse_numbers("16, 64,256,16", "--lengths") == [16, 64, 256]


@pytest.mark.parametrize("text", ["", "16,", "a", "0", "-3", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ScenarioInvalid, match="--lengths is"):
        parse_numbers(text, "--lengths")


def test_table_and_sentences_show_the_cost(tmp_path: Path) -> None:
    platform = Platform()
    found = measured(tmp_path, platform, Modelled(platform.serve))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(make_cost_table(found.lines))

    assert "2.480" in capture.get(), "2 ms + 16 * 30 us"
    assert "+5.000" in capture.get()
    assert describe_fit(found.fits[-1]).startswith(
        "CPU over all concurrencies: 2.000 ms (2.000 to 2.000) a request + 30.00 us (30.00 to 30.00) a token; 12 runs"
    )
