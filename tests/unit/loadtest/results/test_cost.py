"""Costs that are known are found again."""

import msgspec
import numpy as np
import pytest

from penstock_loadtest.results.cost import (
    Cell,
    CellRun,
    CpuUse,
    Overhead,
    Path,
    find_missing_cells,
    fit_cost,
    fit_line,
    keep_whole_cells,
    list_cells,
    make_overhead,
    summarize_cells,
)


def cell_run(
    cell: Cell,
    *,
    busy_s: float = 1.0,
    idle_s: float = 0.0,
    ttft_s: float = 0.1,
    gap_s: float = 0.01,
    is_late: bool = False,
    finished: int = 100,
) -> CellRun:
    return CellRun(
        **cell._asdict(),
        folder="",
        requests=100,
        finished=finished,
        tokens=finished * cell.output_tokens,
        cpu=CpuUse(wall_s=10.0, busy_s=busy_s, idle_s=idle_s) if cell.path == "platform" else None,
        ttft_p50_s=ttft_s,
        inter_token_p50_s=gap_s,
        inter_token_p99_s=2 * gap_s,
        is_late=is_late,
    )


def programmed(cell: Cell) -> CellRun:
    """1.5 ms a request + 20 us a token, 0.3 s idle in the same time, 4 ms on top of TTFT, 1 ms on top of a gap."""
    through = cell.path == "platform"
    return cell_run(
        cell,
        busy_s=0.3 + 100 * (1.5e-3 + 20e-6 * cell.output_tokens),
        idle_s=0.3,
        ttft_s=0.1 + 0.004 * through,
        gap_s=0.01 + 0.001 * through,
    )


CELLS = list_cells(6, [1, 16], [16, 64, 256], is_direct_too=True)


def test_platform_and_engine_are_measured_next_to_each_other_and_take_turns_to_be_first() -> None:
    cells = list_cells(2, [4], [16, 64], is_direct_too=True)

    assert [cell.path for cell in cells] == [
        "platform",
        "direct",
        "direct",
        "platform",
        "direct",
        "platform",
        "platform",
        "direct",
    ]
    assert len(set(cells)) == len(cells) == 8


def test_without_an_engine_only_the_platform_is_measured() -> None:
    assert {cell.path for cell in list_cells(2, [4], [16], is_direct_too=False)} == {"platform"}


def test_the_programmed_cost_is_fitted() -> None:
    found = make_overhead("http://p/v1", "http://e/v1", {}, [programmed(cell) for cell in CELLS], CELLS)

    assert [line.concurrency for line in found.fits] == [1, 16, None]
    for line in found.fits:
        assert line.fixed_ms == pytest.approx(1.5)
        assert line.per_token_us == pytest.approx(20)
        assert line.fixed_interval_ms == (pytest.approx(1.5), pytest.approx(1.5))
        assert line.worst_ms == pytest.approx(0, abs=1e-9)
    assert found.is_complete
    assert found.notes == [
        "Idle, the processes spend 30.0 ms of CPU a second; under load 67.4. The idle share is subtracted."
    ]


def test_added_latency_is_the_difference_to_the_engine() -> None:
    line = summarize_cells([programmed(cell) for cell in CELLS])[0]

    assert line.added_ttft_ms is not None
    assert line.added_ttft_ms.value == pytest.approx(4.0)
    assert line.added_ttft_ms.low is not None, "six rounds are enough for an interval"
    assert line.added_inter_token_ms is not None
    assert line.added_inter_token_ms.value == pytest.approx(1.0)
    assert line.added_inter_token_p99_ms is not None
    assert line.added_inter_token_p99_ms.value == pytest.approx(2.0)
    assert (line.cpu_ms, line.busy_ms, line.idle_cores) == (
        pytest.approx(1.82),
        pytest.approx(4.82),
        pytest.approx(0.03),
    )


def test_without_an_engine_nothing_is_said_of_added_latency() -> None:
    line = summarize_cells([programmed(Cell(1, 1, 16, "platform"))])[0]

    assert line.added_ttft_ms is None
    assert line.cpu_ms == pytest.approx(1.82)


def test_least_squares_agrees_with_numpy() -> None:
    rng = np.random.default_rng(2)
    x = rng.uniform(0, 300, 40)
    points = np.column_stack([x, 2 + 0.05 * x + rng.normal(0, 1, 40)])
    slope, intercept = np.polyfit(points[:, 0], points[:, 1], 1)

    assert fit_line(points) == (pytest.approx(intercept), pytest.approx(slope))


def test_one_length_alone_gives_no_fit() -> None:
    runs = [programmed(Cell(number, 1, 64, "platform")) for number in (1, 2, 3)]

    assert fit_cost(runs, None, np.random.default_rng(0)) is None


def noisy(rng: np.random.Generator) -> list[CellRun]:
    runs = []
    for run in map(programmed, CELLS):
        cpu = run.cpu and msgspec.structs.replace(run.cpu, busy_s=run.cpu.busy_s * rng.uniform(0.9, 1.1))
        runs.append(msgspec.structs.replace(run, cpu=cpu))
    return runs


def test_the_interval_of_the_fit_is_as_wide_as_the_noise() -> None:
    found = [fit_cost(noisy(np.random.default_rng(seed)), None, np.random.default_rng(0)) for seed in range(8)]
    intervals = [line.per_token_interval_us for line in found if line and line.per_token_interval_us]

    assert len(intervals) == 8
    assert sum(low < 20 < high for low, high in intervals) >= 6, "95 % of them in the long run"
    assert all(0.5 < high - low < 8 for low, high in intervals)


def test_a_fit_of_few_runs_has_no_interval() -> None:
    found = fit_cost(
        [programmed(cell) for cell in CELLS if cell.round == 1 and cell.concurrency == 1],
        None,
        np.random.default_rng(0),
    )

    assert found is not None
    assert found.runs == 3
    assert (found.fixed_interval_ms, found.per_token_interval_us) == (None, None)


def test_a_run_without_its_neighbour_is_made_again() -> None:
    cells = list_cells(1, [1], [16, 64], is_direct_too=True)
    runs = [programmed(cell) for cell in cells[:3]]

    assert keep_whole_cells(runs, is_direct_too=True) == runs[:2]
    assert find_missing_cells(cells, keep_whole_cells(runs, is_direct_too=True)) == cells[2:]
    assert keep_whole_cells([programmed(cells[0])], is_direct_too=False) == [programmed(cells[0])]


@pytest.mark.parametrize("path", ["platform", "direct"])
def test_what_makes_the_figures_doubtful_is_said(path: Path) -> None:
    cells = [Cell(1, 1, 16, path), Cell(1, 1, 64, path)]
    found = make_overhead("u", None, {}, [cell_run(cells[0], is_late=True, finished=90)], cells)

    assert not found.is_complete
    assert "Not finished: 1 of 2 runs." in found.notes
    assert "10 of 100 requests did not finish; the cost is counted per finished one." in found.notes
    assert any("sent late" in note for note in found.notes)


def test_a_run_in_which_nothing_finished_has_no_cost() -> None:
    run = cell_run(Cell(1, 1, 16, "platform"), finished=0)

    assert run.cpu_ms is None
    assert summarize_cells([run])[0].cpu_ms is None


def test_an_overhead_survives_json() -> None:
    found = make_overhead("u", "v", {}, [programmed(cell) for cell in CELLS], CELLS)

    assert msgspec.convert(msgspec.to_builtins(found), Overhead, strict=False) == found
