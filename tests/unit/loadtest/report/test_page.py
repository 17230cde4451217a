"""The report of a run: what its folder holds, read back from the page's own markup."""

import re
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from penstock_loadtest.errors import RecordsInvalid
from penstock_loadtest.report import number_formats
from penstock_loadtest.report.folder import SLOWEST, read_run
from penstock_loadtest.report.page import Pictures, render_run, write_report
from penstock_loadtest.results.records import write_json
from penstock_loadtest.results.summary import Summary, summarize
from tests.unit.loadtest.report.pages import SHORT, Page, finished, reported, request, written
from tests.unit.loadtest.simulated import SCENARIO, simulate, write_folder

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


def without_plots(folder: Path) -> Page:
    return Page(render_run(read_run(folder), Pictures([], [], [])))


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
