"""Pages from templates/*.html.j2, with every text escaped: one file each, nothing from outside, light or dark as the
reader's system is, fit to be printed.

Only the style sheet and the plots, which are made here and in style.py, go in as markup.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from penstock_loadtest.report.parts import PageHeader
from penstock_loadtest.report.style import PALETTE

TEMPLATES = Path(__file__).with_name("templates")


def render_page(template: str, top: PageHeader, sections: Mapping[str, object]) -> str:
    """Fill one of the templates that extend page.html.j2; `sections` are the values that it names beyond `top`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["anchor"] = make_anchor
    return environment.get_template(template).render(top=top, styles=_read_styles(), **sections)


def make_anchor(title: str) -> str:
    """A section's link target: its title in lower case, words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _read_styles() -> Markup:
    """The palette as CSS variables, then the rules. Dark only on screens: paper is white."""
    light = ";".join(f"--{colour.name}:{colour.light}" for colour in PALETTE)
    dark = ";".join(f"--{colour.name}:{colour.dark}" for colour in PALETTE)
    rules = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return Markup(f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}")
