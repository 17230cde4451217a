"""The report of a run, a ladder, a comparison: what the files hold, read back from the page's own markup; and the
terminal's table."""

import random
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from penstock_loadtest.errors import RecordsInvalid
from penstock_loadtest.report import number_formats
from penstock_loadtest.report.folder import SLOWEST, Checked, read_run
from penstock_loadtest.report.page import Pictures, render_run, write_report
from penstock_loadtest.report.rerun import dump_scenario
from penstock_loadtest.report.table import make_summary_table
from penstock_loadtest.results.intervals import MIN_PAIRS
from penstock_loadtest.results.knee import Next, Rules, Step, choose_next_step, make_ladder
from penstock_loadtest.results.records import Record, write_json
from penstock_loadtest.results.sides import Comparison, Run, Setting, choose_next_run, make_comparison
from penstock_loadtest.results.summary import Summary, summarize
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Scenario, Sessions, Share, Trace, load_scenario
from tests.unit.loadtest.simulated import SCENARIO, TENANTS, simulate, write_folder

RUN_PLOTS = {
    *(
        "ttft_over_time",
        "tpot_over_time",
        "load_over_time",
        "outcomes_over_time",
        "tokens_over_time",
        "in_flight_over_time",
        "replicas_over_time",
    ),
    *("ttft_cdf", "tpot_cdf", "inter_token_cdf", "e2e_cdf"),
    *("tenants_goodput", "tenants_tokens", "tenants_ttft", "tenants_tpot"),
}
SHORT = msgspec.structs.replace(SCENARIO, duration_s=20.0, warmup_s=0.0)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page taken apart; every element must be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def alerts(self) -> int:
        return sum(attributes.get("role") == "alert" for _, attributes in self.tags)

    def row(self, name: str) -> list[str]:
        return next(row for row in self.cells if row and row[0] == name)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def written(folder: Path) -> Page:
    """The page of a folder, written with its plots."""
    return Page(write_report(folder).read_text(encoding="utf-8"))


def without_plots(folder: Path) -> Page:
    return Page(render_run(read_run(folder), Pictures([], [], [])))


def reported(folder: Path, records: Sequence[Record], scenario: Scenario = SHORT) -> Page:
    return written(write_folder(folder, records, scenario))


def request(index: int = 0, **facts: object) -> Record:
    return msgspec.convert({"index": index, "intended_s": float(index), "sent_s": float(index), **facts}, Record)


def finished(index: int, *, ttft: float = 0.2, gap: float = 0.02, chunks: int = 4, **facts: object) -> Record:
    times = [index + ttft + gap * n for n in range(chunks)]
    common = {
        "first_s": times[0],
        "end_s": times[-1],
        "chunk_s": times,
        "chunk_tokens": [1] * chunks,
        "tokens": chunks,
        "outcome": "finished",
    }
    return request(index, **common, **facts)


def summary_of_page(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of thousands of requests, with its report."""
    folder = write_folder(tmp_path_factory.mktemp("run"), simulate())
    write_report(folder)
    return folder


def test_a_run_leaves_every_plot_as_a_file_and_in_the_page(whole: Path) -> None:
    page = Page((whole / "report.html").read_text(encoding="utf-8"))

    assert {path.stem for path in (whole / "plots").glob("*.png")} == RUN_PLOTS
    assert page.count("svg") == len(RUN_PLOTS)
    for path in (whole / "plots").glob("*.png"):
        with Image.open(path) as picture:
            picture.verify()
            assert picture.width >= 900


def test_the_page_says_the_figures_of_the_summary(whole: Path) -> None:
    page, summary = Page((whole / "report.html").read_text(encoding="utf-8")), summary_of_page(whole)

    for name, found in (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("Inter-token", summary.inter_token_s),
        ("End to end", summary.e2e_s),
    ):
        assert page.row(name)[1:6] == [
            number_formats.format_duration(value) for value in (found.mean, found.p50, found.p90, found.p99, found.max)
        ]
    assert page.row("good")[1] == f"{summary.goodput.good:,}"
    assert page.row("missed TTFT")[1] == f"{summary.goodput.misses.ttft:,}"
    for group in [*summary.groups.tenant, *summary.groups.replica, *summary.groups.tier, *summary.groups.kind]:
        assert group.name is not None
        assert page.row(group.name)[1:4] == [
            f"{group.requests:,}",
            f"{group.outcomes.finished:,}",
            number_formats.format_share(group.goodput.share),
        ]
    assert " ".join(number_formats.format_share(summary.goodput.share).split()) in page.text


def test_the_slowest_requests_are_listed_by_their_wait_with_where_they_went(whole: Path) -> None:
    slowest = sorted(
        (r for r in simulate() if r.intended_s >= SCENARIO.warmup_s and r.ttft_s), key=lambda r: -(r.ttft_s or 0)
    )[:SLOWEST]

    page = Page((whole / "report.html").read_text(encoding="utf-8"))

    rows = [row for row in page.cells if row[0].startswith("req_")]
    assert [row[0] for row in rows] == [record.request_id for record in slowest]
    first = slowest[0]
    assert rows[0][1:4] == [
        number_formats.format_duration(first.ttft_s),
        number_formats.format_duration(first.predicted_ttft_s),
        number_formats.format_duration(first.tpot_s),
    ]
    assert rows[0][6] == str(first.cached_tokens)
    assert rows[0][9:] == [first.tenant, first.tier, first.replica]


def test_the_page_needs_nothing_from_outside(whole: Path) -> None:
    page = Page((whole / "report.html").read_text(encoding="utf-8"))

    assert page.count("script") == page.count("link") == page.count("img") == page.count("iframe") == 0
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"@import|url\((?!['\"]?#)", page.source)


NASTY = '<script>alert("1")</script>&amp;<img src=x>'
DOLLARS = "$x_1$"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a run in which every name is an attempt at something."""
    records = [
        finished(n, tenant=(NASTY, DOLLARS, "_hidden")[n % 3], replica=NASTY, tier=NASTY, request_id=NASTY)
        for n in range(6)
    ]
    records.append(request(6, outcome="failed", end_s=6.1, error=NASTY))
    return reported(tmp_path_factory.mktemp("hostile"), records, msgspec.structs.replace(SHORT, name=NASTY))


def test_what_the_server_said_stays_text(hostile: Page) -> None:
    assert hostile.count("script") == hostile.count("img") == 0
    assert hostile.source.count("<script") == 0
    assert hostile.text.count(NASTY) >= 4


def test_a_scenario_with_a_hostile_name_stays_text(tmp_path: Path) -> None:
    page = reported(tmp_path, [finished(0)], msgspec.structs.replace(SHORT, name='"><img>'))

    assert page.count("img") == 0
    assert '"><img>: load test' in page.text
    assert page.count("h1") == 1


def test_hostile_names_of_models_and_sides_stay_text(tmp_path: Path) -> None:
    ladder = make_ladder(
        "http://127.0.0.1:1/v1", "<script>", "requests/s", Rules(start_rate=1.0, max_rate=64.0), {}, []
    )
    a, b = (Setting(name=name, url="http://x/v1", model="<script>", overrides=[]) for name in ('"><img>', "<b>"))
    for name, content in (("ladder", ladder), ("compare", make_comparison(a, b, 10, {}, []))):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / f"{name}.json", content)

    pages = [written(tmp_path / name) for name in ("ladder", "compare")]

    assert all(page.count(tag) == 0 for page in pages for tag in ("script", "img", "b"))
    assert "Ladder against <script>" in pages[0].text
    assert '<b> against "><img>' in pages[1].text
    assert "<b>: <script> at http://x/v1" in pages[1].text


def test_dollars_and_underscores_in_names_are_not_taken_for_formulas(hostile: Page) -> None:
    drawn = " ".join(re.findall(r"<svg.*?</svg>", hostile.source, re.DOTALL))

    assert f">{DOLLARS}</text>" in drawn
    assert ">_hidden</text>" in drawn


def test_the_page_can_be_read_without_seeing_it(whole: Path) -> None:
    page = Page((whole / "report.html").read_text(encoding="utf-8"))

    images = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(images) == len(RUN_PLOTS)
    assert all(len(image["aria-label"] or "") > 30 for image in images)
    assert page.count("caption") == page.count("table") > 3
    assert [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    assert page.count("h1") == 1
    assert ("html", {"lang": "en"}) in page.tags
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_plots_take_their_colours_from_the_page_so_that_they_work_on_dark(whole: Path) -> None:
    page = Page((whole / "report.html").read_text(encoding="utf-8"))

    drawings = re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)
    assert len(drawings) == len(RUN_PLOTS)
    for drawing in drawings:
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) <= {
            "#000000"
        }  # matplotlib's default of paths that draw nothing
        used = set(re.findall(r"var\(--(\w+)\)", drawing))
        assert used
        assert all(page.source.count(f"--{name}:") == 2 for name in used)
    assert "prefers-color-scheme:dark" in page.source


def test_a_killed_run_still_gets_its_report_and_its_summary(tmp_path: Path) -> None:
    records = simulate(SHORT)

    page = written(write_folder(tmp_path, records, SHORT, is_killed=True))

    assert "This run was killed." in page.text
    assert "Not checked" in page.text
    assert summary_of_page(tmp_path) == summarize(records, SHORT)


def test_a_report_can_be_made_again_and_is_the_same(tmp_path: Path) -> None:
    first = write_report(write_folder(tmp_path, [finished(n) for n in range(5)], SHORT)).read_bytes()

    again = write_report(tmp_path).read_bytes()

    assert again == first


def test_a_run_without_requests_says_so(tmp_path: Path) -> None:
    page = reported(tmp_path, [])

    assert "No requests." in page.text
    assert page.count("svg") == 1  # replicas were observed


def test_a_run_in_which_everything_failed_has_a_report(tmp_path: Path) -> None:
    page = reported(
        tmp_path,
        [request(n, outcome="failed", end_s=n + 0.1, error="The server closed the connection.") for n in range(20)],
    )

    assert "No request finished." in page.text
    assert page.row("The server closed the connection.")[1:] == [number_formats.NONE, "failed", "20"]


def test_requests_that_were_never_sent_have_a_report(tmp_path: Path) -> None:
    page = reported(tmp_path, [request(n, sent_s=None) for n in range(3)])

    assert page.row("unfinished")[1] == "3"


def test_a_single_request_has_a_report(tmp_path: Path) -> None:
    page = reported(tmp_path, [finished(0)])

    assert page.row("TTFT")[1:6] == ["200\N{NO-BREAK SPACE}ms"] * 5


def test_a_run_of_answers_that_are_not_streamed_is_reported_by_their_whole_time(tmp_path: Path) -> None:
    answer = {"outcome": "finished", "is_whole": True, "tokens": 9, "chunk_tokens": [9]}

    page = reported(tmp_path, [request(n, **answer, end_s=n + 1.5, chunk_s=[n + 1.5]) for n in range(10)])

    assert page.row("TTFT")[1:] == page.row("TPOT")[1:] == [number_formats.NONE] * 5 + ["0 requests"]
    assert "End to end, median and p99 1.5 s p99 1.5 s" in page.text
    assert not list((tmp_path / "plots").glob("t[tp]*t_*"))


def test_the_slowest_requests_are_not_those_of_the_warm_up(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [finished(0, ttft=9.0), finished(6), finished(7, ttft=0.3)], SCENARIO)

    assert [record.index for record in read_run(folder).slowest] == [7, 6]


def test_a_late_run_says_so_loudly_and_one_in_time_does_not(tmp_path: Path) -> None:
    late = [msgspec.structs.replace(finished(n), sent_s=n + 0.05) for n in range(5)]

    late_page = without_plots(write_folder(tmp_path / "late", late, SHORT))
    page = without_plots(write_folder(tmp_path / "in-time", [finished(n) for n in range(5)], SHORT))

    assert "The tester was late." in late_page.text
    assert late_page.alerts == 1
    assert page.alerts == 0


def test_a_ledger_that_does_not_balance_is_a_banner(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [finished(0)], SHORT)
    write_json(
        folder / "ledger.json",
        {"is_balanced": False, "sentences": ["The ledger does not balance.", "1 x two ends: request 0."]},
    )

    page = without_plots(folder)

    assert page.alerts == 1
    assert "Does not balance" in page.text
    assert page.text.count("1 x two ends: request 0.") == 2


def test_an_interrupted_run_is_a_banner(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [finished(0)], SHORT)
    write_json(
        folder / "run.json",
        {
            "ended": "2030-01-02T03:04:05+00:00",
            "is_interrupted": True,
            "turns_not_sent": 2,
            "plan_error": "trace.csv, line 7: no.",
        },
    )
    write_json(folder / "target.json", {"url": "http://127.0.0.1:1/v1", "model": "small", "exact": None})

    page = without_plots(folder)

    assert "This run was interrupted." in page.text
    assert "trace.csv, line 7: no." in page.text
    assert "2 later turns of conversations never left" in page.text
    assert "small at http://127.0.0.1:1/v1 · 2030-01-02 03:04:05 UTC" in page.text
    assert "--url http://127.0.0.1:1/v1" in page.text


@pytest.mark.parametrize("missing", ["scenario.json", "records.jsonl"])
def test_a_folder_that_holds_no_run_is_refused_with_the_files_name(tmp_path: Path, missing: str) -> None:
    folder = write_folder(tmp_path, [finished(0)], SHORT)
    (folder / missing).unlink()

    with pytest.raises(RecordsInvalid, match=missing):
        write_report(folder)


def test_a_broken_observation_is_refused_with_file_and_line_but_a_cut_last_one_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, [finished(0)], SHORT)
    (folder / "observed.jsonl").write_text(
        '{"t_s": 1.0, "replicas": {"m/gpu": 1}}\n{"t_s": 2.0, "repl', encoding="utf-8"
    )

    observed = read_run(folder).observed
    (folder / "observed.jsonl").write_text("{}\n", encoding="utf-8")

    assert [sample.t_s for sample in observed] == [1.0]
    with pytest.raises(RecordsInvalid, match=r"observed\.jsonl, line 1"):
        read_run(folder)


def test_many_tenants_and_replicas_do_not_flood_the_page(tmp_path: Path) -> None:
    records = [
        finished(n, tenant=f"tenant-with-a-rather-long-name-{n % 60}", replica=f"replica-{n % 45}") for n in range(180)
    ]

    page = reported(tmp_path, records)

    assert sum(row[0].startswith("tenant-") for row in page.cells) == 30
    assert "30 more tenants" in page.text
    assert "15 more replicas" in page.text
    assert max(len(cell) for row in page.cells for cell in row) < 100


def some_ladder(folder: Path) -> int:
    rules, steps = Rules(start_rate=1.0, max_rate=64.0), list[Step]()
    while isinstance(following := choose_next_step(steps, rules), Next):
        rate = following.rate
        share = min(1.0, max(0.0, 1.6 - rate / 14))
        figures = {
            "goodput": share,
            "goodput_per_s": share * rate,
            "offered_rate": rate,
            "achieved_rate": rate,
            "output_tokens_per_s": 40 * rate,
        }
        latencies = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.1 * rate, "tpot_p50_s": 0.02, "tpot_p99_s": 0.03}
        counts = {"judged": 100, "shed": 0, "failed": 0, "unfinished": 0}
        flags = {"is_balanced": True, "is_late": rate > 20}
        named = {
            "number": len(steps) + 1,
            "rate": rate,
            "purpose": following.purpose,
            "reason": following.reason,
            "folder": "x",
        }
        steps.append(msgspec.convert(named | figures | latencies | counts | flags, Step))
    write_json(folder / "ladder.json", make_ladder("http://127.0.0.1:1/v1", "small", "requests/s", rules, {}, steps))
    return len(steps)


def test_a_ladders_page_marks_the_knee_and_has_a_row_a_step(tmp_path: Path) -> None:
    steps = some_ladder(tmp_path)

    page = written(tmp_path)

    assert sum(bool(re.match(r"\d+, (not )?held", row[0])) for row in page.cells) == steps
    assert page.count("svg") == 4
    assert page.source.count("knee ") >= 4
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {
        "ladder_goodput",
        "ladder_rates",
        "ladder_ttft",
        "ladder_tpot",
    }


def test_a_ladder_without_steps_or_without_figures_has_a_page(tmp_path: Path) -> None:
    rules = Rules(start_rate=1.0, max_rate=64.0)
    nothing = {
        name: None
        for name in Step.__struct_fields__
        if name.endswith("_s") or name in ("goodput", "offered_rate", "achieved_rate")
    }
    counts = {
        "judged": 0,
        "shed": 0,
        "failed": 9,
        "unfinished": 0,
        "is_balanced": True,
        "is_late": False,
        "is_dead": True,
    }
    dead = msgspec.convert(
        {"number": 1, "rate": 1.0, "purpose": "raise", "reason": "the first rate", "folder": "x"} | nothing | counts,
        Step,
    )
    for name, steps in (("none", []), ("dead", [dead])):
        (tmp_path / name).mkdir()
        write_json(
            tmp_path / name / "ladder.json",
            make_ladder("http://127.0.0.1:1/v1", "small", "requests/s", rules, {}, steps),
        )

    unfinished, stopped = (written(tmp_path / name) for name in ("none", "dead"))

    assert "This ladder is not finished." in unfinished.text
    assert "The server stopped answering at 1 requests/s." in stopped.text


def some_comparison(pairs: int, *, measured: int) -> Comparison:
    a, b = (Setting(name=name, url=f"http://{name}.test/v1", model="small", overrides=[]) for name in ("old", "new"))
    rng, runs = random.Random(5), list[Run]()
    while (following := choose_next_run(runs, pairs)) and len(runs) < 2 * measured:
        faster = 0.8 if following.side == "b" else 1.0
        figures = {
            "TTFT": 0.2 * faster * rng.uniform(0.98, 1.02),
            "TPOT": 0.02 * rng.uniform(0.9, 1.1),
            "throughput": 900 * rng.uniform(0.98, 1.02),
            "goodput": None,
        }
        facts = {
            "pair": following.pair,
            "side": following.side,
            "folder": "x",
            "figures": figures,
            "requests": 100,
            "finished": 99,
        }
        runs.append(msgspec.convert(facts | {"is_balanced": True, "is_late": False}, Run))
    return make_comparison(a, b, pairs, {}, runs)


def test_a_comparisons_page_has_ratios_with_intervals_and_every_run(tmp_path: Path) -> None:
    comparison = some_comparison(10, measured=10)
    write_json(tmp_path / "compare.json", comparison)

    page = written(tmp_path)

    ratio = comparison.rows[0].ratio
    assert page.row("TTFT")[3:5] == [f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
    assert page.row("TTFT")[-1] == "different"
    assert page.row("goodput")[3] == number_formats.NONE
    assert sum(row[0].startswith("pair ") for row in page.cells) == 20
    assert page.alerts == 0


@pytest.mark.parametrize("measured", [0, MIN_PAIRS - 1])
def test_a_comparison_with_too_few_pairs_shows_no_interval(tmp_path: Path, measured: int) -> None:
    write_json(tmp_path / "compare.json", some_comparison(10, measured=measured))

    page = written(tmp_path)

    assert "This comparison is not finished." in page.text
    assert page.row("TTFT")[-1] == "not known"


def test_the_terminals_table_says_the_same_as_the_summary() -> None:
    summary = summarize(simulate(SHORT), SHORT)

    text = _printed(summary, Checked(is_balanced=True, sentences=["The ledger balances.", "All is well."]))

    for value in (summary.ttft_s.p50, summary.ttft_s.p99, summary.tpot_s.p90, summary.e2e_s.max):
        assert number_formats.format_duration(value).replace("\N{NO-BREAK SPACE}", " ") in text.replace(
            "\N{NO-BREAK SPACE}", " "
        )
    assert number_formats.format_share(summary.goodput.share) in text
    assert "The ledger balances." in text
    assert all(name in text for name in TENANTS)
    assert "late" not in text.replace("lateness", "")


def test_the_terminals_table_fits_eighty_columns_and_prints_markup_as_text() -> None:
    records = [finished(n, tenant="[red]a[/red]" if n % 2 else "b", error="[bold]broken[/nonsense]") for n in range(4)]

    text = _printed(summarize(records, SHORT), None)

    assert max(map(len, text.splitlines())) <= 80
    assert "[red]a[/red]" in text
    assert "[bold]broken[/nonsense]" in text


def test_the_terminals_table_of_an_empty_or_late_run() -> None:
    late = summarize([msgspec.structs.replace(finished(0), sent_s=0.5)], SHORT)

    assert "The tester was late." in _printed(late, None)
    assert number_formats.NONE in _printed(summarize([], SHORT), None)


def _printed(summary: Summary, ledger: Checked | None) -> str:
    console = Console(width=80, color_system=None, file=StringIO())
    console.print(make_summary_table(summary, ledger))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (None, "–"),
            (0.0, "0 ms"),
            (0.0000123, "12.3 µs"),
            (0.00123, "1.23 ms"),
            (0.0999, "99.9 ms"),
            (0.1234, "123 ms"),
            (1.0, "1 s"),
            (12.34, "12.3 s"),
        ),
        *(
            (119.6, "120 s"),
            (120.0, "2 min"),
            (125.0, "2 min 5 s"),
            (3600.0, "1 h"),
            (3725.0, "1 h 2 min"),
            (float("nan"), "–"),
        ),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds: float | None, text: str) -> None:
    assert number_formats.format_duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


@given(st.floats(0.001, 119))
def test_a_duration_is_within_half_a_percent_of_what_it_says(seconds: float) -> None:
    value, unit = number_formats.format_duration(seconds).split("\N{NO-BREAK SPACE}")

    assert float(value) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0 %"), (1.0, "100 %"), (0.9996, "> 99.9 %"), (0.0004, "< 0.1 %"), (0.9444, "94.4 %")],
)
def test_a_share_that_is_not_all_or_nothing_never_reads_like_it(value: float | None, text: str) -> None:
    assert number_formats.format_share(value).replace("\N{NO-BREAK SPACE}", " ") == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_only_all_is_a_hundred_percent(value: float) -> None:
    assert number_formats.format_share(value).replace("\N{NO-BREAK SPACE}", " ") not in ("0 %", "100 %")
