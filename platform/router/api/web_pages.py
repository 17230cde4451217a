"""GET / and GET /docs: a page that says what runs and has a playground, and the API's description to read.

They are files of this package, the same for everybody, and hold nothing about models or tenants: what a page shows
beyond version and readiness, its script asks the API for, with the key that the reader has typed. Invariant: a page
loads nothing from another server and runs no script but those here (Content Security Policy, level 3).
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from penstock.router.transport.exchange import Exchange

FOLDER = Path(__file__).with_name("web")
HTML, CSS, SCRIPT, SVG = (
    b"text/html; charset=utf-8",
    b"text/css; charset=utf-8",
    b"text/javascript; charset=utf-8",
    b"image/svg+xml",
)
FILES: Mapping[str, tuple[str, bytes]] = {
    "/": ("home.html", HTML),
    "/docs": ("docs.html", HTML),
    "/docs/pages.css": ("pages.css", CSS),
    "/docs/icon.svg": ("icon.svg", SVG),
    **{f"/docs/{name}": (name, SCRIPT) for name in ("api.js", "docs.js", "elements.js", "home.js", "schema.js")},
}
"""File and content type of each path."""
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    b" form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What a page may load and do: files of its own origin only, and no text becomes a script or an element."""
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def web_pages(folder: Path = FOLDER) -> dict[str, Callable[[Exchange], Awaitable[None]]]:
    """The handler of each path. Raises OSError if a file is not there."""
    return {
        path: partial(_answer, (folder / name).read_bytes(), content_type)
        for path, (name, content_type) in FILES.items()
    }


async def _answer(content: bytes, content_type: bytes, exchange: Exchange) -> None:
    await exchange.answer(content, content_type=content_type, headers=HEADERS)
