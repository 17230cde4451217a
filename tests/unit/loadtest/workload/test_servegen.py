import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock_loadtest.errors import ScenarioInvalid, TraceInvalid
from penstock_loadtest.scenario import Trace
from penstock_loadtest.workload.servegen import Pattern, Renewal, measure_mean_rate
from penstock_loadtest.workload.servegen_lengths import LengthTable
from penstock_loadtest.workload.trace_row import TraceRow
from penstock_loadtest.workload.traces import read_trace

HEADER = "t_s,client,rate_rps,cv,pattern,shape,scale\n"
RATES = HEADER + "".join(
    f"{t},{client},{rate},1,{pattern},{shape},1\n"
    for t in (0, 600)
    for client, rate, pattern, shape in ((3, 2, "G", 1), (8, 1, "W", 0.7))
)


def flat(value: float) -> list[float]:
    return [value] * 15


def folder(tmp_path: Path, rates: str = RATES, lengths: list[dict[str, object]] | None = None) -> Path:
    """Returns the file of rates; the table of lengths lies beside it."""
    lines = lengths or [{"t_s": 0, "client": 3, "input_tokens": flat(100), "output_tokens": flat(10)}]
    (tmp_path / "a_lengths.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    )
    path = tmp_path / "a_client_rates.csv.gz"
    path.write_bytes(gzip.compress(rates.encode()))
    return path


def rows_of(path: Path, seed: int = 1, **settings: float) -> list[TraceRow]:
    return list(read_trace(Trace(format="servegen", path=path, **settings), seed))  # type: ignore[arg-type]


def test_the_same_seed_draws_the_same_requests_and_another_seed_others(tmp_path: Path) -> None:
    path = folder(tmp_path)

    assert rows_of(path) == rows_of(path)
    assert rows_of(path) != rows_of(path, seed=2)


def test_clients_are_merged_by_time_and_keep_their_rates(tmp_path: Path) -> None:
    rows = rows_of(folder(tmp_path))

    assert all(a.at_s <= b.at_s for a, b in pairwise(rows))
    assert 0 <= rows[0].at_s < rows[-1].at_s < 1200
    assert sum(row.client == "3" for row in rows) == pytest.approx(2400, rel=0.1)
    assert sum(row.client == "8" for row in rows) == pytest.approx(1200, rel=0.2)


def test_one_clients_arrivals_do_not_depend_on_who_else_is_there(tmp_path: Path) -> None:
    alone = HEADER + "".join(line + "\n" for line in RATES.splitlines()[1:] if line.split(",")[1] == "8")
    both = [row.at_s for row in rows_of(folder(tmp_path)) if row.client == "8"]

    assert [row.at_s for row in rows_of(folder(tmp_path, alone))] == both


def test_windows_are_drawn_only_when_they_are_reached(tmp_path: Path) -> None:
    path = folder(tmp_path, RATES + "1200,3,1,1,G,1,1\n1800,3,nonsense,1,G,1,1\n")

    assert len(rows_of(path, end_s=1200)) > 3000
    with pytest.raises(TraceInvalid, match=r"a_client_rates.csv.gz, line 7: rate_rps is 'nonsense'"):
        rows_of(path)


def test_a_part_begins_at_zero_and_ends_where_it_says(tmp_path: Path) -> None:
    rows = rows_of(folder(tmp_path), start_s=300, end_s=900, time_scale=0.5)

    assert 0 <= rows[0].at_s < rows[-1].at_s < 300
    assert len(rows) == pytest.approx(1800, rel=0.15)


def test_rates_count_from_the_files_first_window(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    lines = [line.split(",", 1) for line in RATES.splitlines()[1:]]
    late = HEADER + "".join(f"{int(t_s) + 7200},{rest}\n" for t_s, rest in lines)

    early_rows = rows_of(folder(tmp_path), start_s=300, end_s=900, rate=2)
    late_rows = rows_of(folder(tmp_path / "late", late), start_s=300, end_s=900, rate=2)

    assert [row.at_s for row in late_rows] == pytest.approx([row.at_s for row in early_rows])


@pytest.mark.parametrize("rate", [0.5, 3.0, 12.0])
def test_a_rate_thins_or_thickens_to_its_mean_after_time_scaling(tmp_path: Path, rate: float) -> None:
    rows = rows_of(folder(tmp_path), rate=rate, time_scale=2)

    assert len(rows) / 2400 == pytest.approx(rate, rel=0.15)


def test_the_mean_rate_is_that_of_the_part_that_is_replayed(tmp_path: Path) -> None:
    path = folder(tmp_path, HEADER + "0,1,2,1,G,1,1\n600,1,4,1,G,1,1\n")

    assert measure_mean_rate(Trace(format="servegen", path=path)) == 3
    assert measure_mean_rate(Trace(format="servegen", path=path, start_s=300, end_s=660)) == pytest.approx(
        (300 * 2 + 60 * 4) / 360
    )
    with pytest.raises(ScenarioInvalid, match="no requests between 1200 s and inf s"):
        measure_mean_rate(Trace(format="servegen", path=path, start_s=1200))


@pytest.mark.parametrize(
    ("pattern", "shape", "cv"),
    [("G", 4.0, 0.5), ("G", 1.0, 1.0), ("G", 1 / 9, 3.0), ("W", 1.0, 1.0), ("W", 0.5, 5**0.5)],
)
def test_gaps_have_mean_1_and_the_shapes_variation(pattern: Pattern, shape: float, cv: float) -> None:
    times = Renewal(np.random.default_rng(1)).arrivals(200_000, pattern, shape)
    gaps = np.diff(times)

    assert gaps.mean() == pytest.approx(1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("pattern", "shape"), [("G", 1 / 25), ("G", 20.0), ("W", 0.4)])
def test_a_process_is_in_equilibrium_from_the_start(pattern: Pattern, shape: float) -> None:
    """Begun with an arrival instead, a bursty client would have a dozen requests more at every start, a steady one half
    a request less."""
    counts = [len(Renewal(np.random.default_rng([5, seed])).arrivals(2.0, pattern, shape)) for seed in range(20_000)]

    assert np.mean(counts) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(("pattern", "shape"), [("G", 0.5), ("W", 0.5), ("G", 10_000.0)])
def test_a_process_cut_into_windows_is_the_same_process(pattern: Pattern, shape: float) -> None:
    whole = Renewal(np.random.default_rng(2))
    process = Renewal(np.random.default_rng(2))
    gaps_whole = np.diff(whole.arrivals(50_000, pattern, shape))

    parts = [start + process.arrivals(10.0, pattern, shape) for start in np.arange(0, 50_000, 10)]

    gaps = np.diff(np.concatenate(parts))
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(gaps_whole.mean(), rel=0.1)
    assert gaps.std() == pytest.approx(gaps_whole.std(), rel=0.15)


def test_fits_that_are_burstier_than_any_service_are_bounded(tmp_path: Path) -> None:
    rows = rows_of(folder(tmp_path, HEADER + "0,1,50,1,W,0.0069,1\n0,2,50,1,G,0.0001,1\n"))

    assert 10_000 < len(rows) < 200_000


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("600,3,1,1,X,1,1", "pattern is 'X', not G (Gamma) or W (Weibull)"),
        ("600,3,1,1,G,0,1", "shape is 0"),
        ("600,3,-1,1,G,1,1", "rate_rps is '-1'"),
        ("600,3,nan,1,G,1,1", "rate_rps is 'nan'"),
        ("600,a,1,1,G,1,1", "client is 'a'"),
        ("600,8,1,1,G,1,1", "client 8 has a row in this window already"),
        ("0,9,1,1,G,1,1", "the time runs back by 600 s"),
        ("700,9,1,1,G,1,1", "a window 100 s behind the one before; they are 600 s long"),
        ("1200,9,1,1,G,1", "6 fields where the header has 7"),
    ],
)
def test_an_unreadable_line_of_rates_is_reported_with_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = folder(tmp_path, RATES + line + "\n")

    with pytest.raises(TraceInvalid) as caught:
        rows_of(path)

    assert str(caught.value).startswith(f"{path}, line 6: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output_tokens": [1.0] * 14}, "Expected `array` of length >= 15"),
        ({"output_tokens": [-1.0] * 15}, "Expected `float` >= 0"),
        ({"output_tokens": [1.0] * 13 + [3.0, 2.0]}, "quantiles that fall"),
        ({"input_tokens": None}, "neither input_tokens nor text_tokens"),
    ],
)
def test_an_unreadable_line_of_lengths_is_reported_with_file_and_line(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    line: dict[str, object] = {"t_s": 0, "client": 3, "input_tokens": flat(100), "output_tokens": flat(10)}
    path = folder(tmp_path, lengths=[line, line | change])

    with pytest.raises(TraceInvalid) as caught:
        rows_of(path)

    assert str(caught.value).startswith(f"{path.parent / 'a_lengths.jsonl.gz'}, line 2: ")
    assert problem in str(caught.value)


def test_rates_without_lengths_ask_for_them(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (tmp_path / "a_lengths.jsonl.gz").unlink()

    with pytest.raises(ScenarioInvalid, match=r"name the table of lengths as trace.lengths"):
        rows_of(path)


def test_lengths_are_those_of_the_client_and_the_time(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    lines = [
        {"t_s": t, "client": c, "input_tokens": flat(t / 100 + c), "output_tokens": flat(c)}
        for t in (21600, 43200)
        for c in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table, rng = LengthTable.read(path, 0), np.random.default_rng(0)

    def prompt(t_s: float, client: int) -> float:
        return float(table.draw(t_s, client, 1, rng)[0][0])

    assert [prompt(t, 1) for t in (0, 21600, 43199, 43200, 1e6)] == [217, 217, 217, 433, 433]
    assert prompt(21600, 2) == 218
    assert {prompt(21600, 77) for _ in range(20)} in ({217}, {218})


def test_lengths_follow_their_quantiles_and_parts_of_a_prompt_add_up(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    quantiles = [0.0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100]
    path.write_text(
        json.dumps(
            {"t_s": 0, "client": 1, "output_tokens": quantiles, "text_tokens": flat(7), "image_tokens": flat(1000)}
        )
        + "\n"
    )

    prompt, output = LengthTable.read(path, 0).draw(0, 1, 20_000, np.random.default_rng(0))

    assert set(prompt) == {1007}
    assert np.quantile(output, [0.1, 0.5, 0.9]) == pytest.approx([10, 50, 90], abs=2)
    assert (output.min(), output.max()) == (1, 100)


@pytest.mark.parametrize("name", ["language_m-large", "reason_deepseek-r1", "multimodal_mm-image"])
def test_real_rates_are_met_in_the_first_hours(data_dir: Path, name: str) -> None:
    """The bursts of single clients leave the mean of two hours uncertain by several percent."""
    path = data_dir / "servegen" / f"{name}_client_rates.csv.gz"

    rows = rows_of(path, rate=4.0, end_s=7200)

    assert len(rows) / 7200 == pytest.approx(4, rel=0.15)
    assert all(row.prompt_tokens >= 1 and row.output_tokens >= 1 for row in rows)
