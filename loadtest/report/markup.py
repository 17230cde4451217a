"""Pieces of HTML. Every text that comes in is escaped here, and nowhere else; what goes out is markup."""

import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from penstock_loadtest.report.style import Picture


class Column(NamedTuple):
    title: str
    is_text: bool = False  # left, not right
    note: str = ""  # what the title means, where it needs it


class Card(NamedTuple):
    """A headline figure."""

    label: str
    value: str
    note: str
    is_bad: bool = False
    second: str = ""  # figure, below the first


def paragraph(text: str, *, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def header(kicker: str, title: str, line: str) -> str:
    return f"<header>{paragraph(kicker, kind='kicker')}<h1>{escape(title)}</h1>{paragraph(line)}</header>"


def section(title: str, *blocks: str) -> str:
    """A heading with what follows; the link target is its title in lower case."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{"".join(blocks)}</section>'


def banner(title: str, text: str) -> str:
    return f'<div class="banner" role="alert"><strong>{escape(title)}</strong> {escape(text)}</div>'


def cards(found: Sequence[Card]) -> str:
    items = "".join(
        f'<div{_class("card bad" if card.is_bad else "card")}><dt>{escape(card.label)}</dt><dd class="value">{escape(card.value)}</dd>'
        f'{_second(card.second)}<dd class="note">{escape(card.note)}</dd></div>'
        for card in found
    )
    return f'<dl class="cards">{items}</dl>'


class Rows(NamedTuple):
    """Rows of a table under a heading of their own."""

    title: str
    rows: Sequence[Sequence[str]]


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, note: str = "") -> str:
    """The first cell of a row is its heading."""
    return grouped_table(caption, columns, [Rows("", rows)], note=note)


def grouped_table(caption: str, columns: Sequence[Column], parts: Sequence[Rows], *, note: str = "") -> str:
    head = "".join(
        f'<th scope="col"{_class("text" if column.is_text else "")}{_title(column.note)}>{escape(column.title)}</th>'
        for column in columns
    )
    body = "".join(
        f"<tbody>{_part_head(part.title, len(columns))}{''.join(_row(columns, row) for row in part.rows)}</tbody>"
        for part in parts
    )
    after = paragraph(note, kind="note") if note else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>{body}</table></div>{after}"
    )


def figure(picture: Picture) -> str:
    drawn = f'<div role="img" aria-label="{escape(picture.alt)}">{picture.svg}</div>'
    return f"<figure><h3>{escape(picture.title)}</h3>{drawn}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def figures(found: Sequence[Picture]) -> str:
    return f'<div class="plots">{"".join(map(figure, found))}</div>'


def code(text: str, label: str) -> str:
    return f'<pre tabindex="0" aria-label="{escape(label)}"><code>{escape(text)}</code></pre>'


def bullets(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def definitions(terms: Sequence[tuple[str, str]]) -> str:
    return f'<dl class="definitions">{"".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms)}</dl>'


def _second(figure: str) -> str:
    return f'<dd class="second">{escape(figure)}</dd>' if figure else ""


def _part_head(title: str, width: int) -> str:
    return f'<tr class="part"><th scope="rowgroup" colspan="{width}">{escape(title)}</th></tr>' if title else ""


def _row(columns: Sequence[Column], row: Sequence[str]) -> str:
    return f"<tr>{''.join(_cell(place, column, cell) for place, (column, cell) in enumerate(zip(columns, row, strict=True)))}</tr>"


def _cell(place: int, column: Column, text: str) -> str:
    kind = _class("text" if column.is_text else "")
    return f'<th scope="row"{kind}>{escape(text)}</th>' if place == 0 else f"<td{kind}>{escape(text)}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _title(note: str) -> str:
    return f' title="{escape(note)}"' if note else ""
