"""The page around a report: one file, nothing from outside, light or dark as the reader's system is, fit to be
printed."""

from html import escape
from pathlib import Path

from penstock_loadtest.report.style import PALETTE


def page(title: str, body: str) -> str:
    """`body` is markup; the policy forbids the page anything but its own styles, whatever a server put into its
    words."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _style() -> str:
    """Dark only on screens: paper is white."""
    light = ";".join(f"--{colour.name}:{colour.light}" for colour in PALETTE)
    dark = ";".join(f"--{colour.name}:{colour.dark}" for colour in PALETTE)
    rules = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"
