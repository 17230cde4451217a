"""Names and messages from outside stay text in every page."""

import re
from pathlib import Path

import msgspec
import pytest

from penstock_loadtest.results.knee import Rules, make_ladder
from penstock_loadtest.results.records import write_json
from penstock_loadtest.results.sides import Setting, make_comparison
from tests.unit.loadtest.report.pages import SHORT, Page, finished, reported, request, written

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
