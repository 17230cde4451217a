"""docs/architecture.md is current: its map, the files and the tests that it names; and README has every package."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture import BEGIN, END, MapWithoutPlace, first_sentence, packages, page, render

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATH_FILES = 30
"""Files at most between the socket and the kernel and back."""


def test_the_map_says_what_the_docstrings_say() -> None:
    assert page(PAGE, render(ROOT)) == PAGE, "`make docs` writes it again"


def test_the_map_has_a_line_for_every_module_and_no_other() -> None:
    shown = set(re.findall(r"^\* \[`[^`]+`\]\(\.\./([^)]+)\): \S", PAGE, re.MULTILINE))

    modules = {
        str(path.relative_to(ROOT))
        for package in ("platform", "loadtest", "bench")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert shown == modules


def test_every_package_and_room_on_the_map_says_what_it_is() -> None:
    assert [package.folder for package in packages(ROOT) if not package.summary] == []


def test_a_prompts_way_and_back_is_a_list_of_files_each_named_once() -> None:
    section = PAGE.partition("## Follow the token ids")[2].partition("\n## ")[0]
    listed = re.findall(r"^(\d+)\. `([^`]+)`: ", section, re.MULTILINE)
    files = [name for _, name in listed]

    assert [int(number) for number, _ in listed] == list(range(1, len(files) + 1))
    assert 20 < len(files) <= PATH_FILES
    assert len(set(files)) == len(files)
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_test_that_proves_an_invariant_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.partition("## Invariants")[2])

    assert len(named) >= 14
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in names, f"{file} has no {test}"


def test_every_file_in_the_drawn_life_of_a_request_exists() -> None:
    drawing = PAGE.partition("```mermaid")[2].partition("```")[0]
    files = re.findall(r"\b[a-z_]+/[a-z_]+\.py", drawing)

    assert len(files) > 20
    assert [name for name in files if not list((ROOT / "platform").rglob(name))] == []


def test_every_file_that_answers_a_question_exists() -> None:
    named = re.findall(r"`(platform/[\w/.]+)`", PAGE.partition("## Where to look")[2].partition("\n## ")[0])

    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_readme_has_a_line_for_every_package() -> None:
    listed = set(re.findall(r"^\| `platform/(\w+)` \|", README, re.MULTILINE))

    assert listed == {path.parent.name for path in (ROOT / "platform").glob("*/__init__.py")}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_what_is_read_first_is_short(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1500


def test_every_file_that_a_recipe_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:platform|tests)/[\w./]+)`", text.partition("## Recipe")[2])

    assert text.count("## Recipe") == 3
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_every_link_within_the_repository_leads_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))

    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_decision_is_dated_and_the_newest_stands_first() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert len(pages) > 8
    for path in pages:
        text = path.read_text(encoding="utf-8")
        dates = re.findall(r"^\*\*(\d{4}-\d\d-\d\d)\. \S", text, re.MULTILINE)
        assert dates == sorted(dates, reverse=True), path.name
        assert len(dates) == len(re.findall(r"^\*\*", text, re.MULTILINE)), path.name


def test_every_link_from_a_module_to_decisions_leads_somewhere() -> None:
    linked = {
        target
        for folder in ("platform", "loadtest", "tests", "bench")
        for path in (ROOT / folder).rglob("*.py")
        for target in re.findall(r"^Decisions: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }

    assert len(linked) > 8
    assert [target for target in linked if not (ROOT / target).is_file()] == []


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Blocks. Not kernels.\n\nMore.", "Blocks"),
        ("LoRA (Hu et al. 2021) beside\nthe base: y = x. Pure.", "LoRA (Hu et al. 2021) beside the base: y = x"),
        ("`penstock up`: the root.", "`penstock up`: the root"),
    ],
)
def test_a_line_is_the_first_sentence_of_a_docstring(docstring: str, sentence: str) -> None:
    assert first_sentence(docstring) == sentence


def test_only_what_stands_between_the_markers_is_written() -> None:
    assert page(f"before\n{BEGIN}\nold\n{END}\nafter", "new") == f"before\n{BEGIN}\n\nnew\n{END}\nafter"
    with pytest.raises(MapWithoutPlace):
        page("before", "new")
