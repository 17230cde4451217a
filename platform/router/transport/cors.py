"""Pages of other origins that may call the API from a browser (Fetch standard, "CORS protocol").

Not a protection of the API, which its keys are: a browser keeps an answer from a page that is not named here. A request
shows its key in a header and never by a cookie, so no credentials are allowed. Pure.
"""

import re
from collections.abc import Iterable, Sequence

from penstock.router.transport.headers import Headers

ANY = "*"
PREFLIGHT_KEPT_S = 600
"""Time for which a browser need not ask again, seconds."""
_EXPOSED = (b"access-control-expose-headers", b"*")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
"""Names of headers, as a preflight asks for them."""


class Cors:
    """The origins whose pages may call. origins: scheme, host and port of each, as browsers send them; or ANY."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._is_any = ANY.encode() in self._origins

    def headers(self, origin: bytes | None) -> Headers:
        """Headers of the response to a request of a page of that origin; none where it is no page's, or not allowed."""
        if not self.allows(origin):
            return ()
        if self._is_any:
            return ((b"access-control-allow-origin", b"*"), _EXPOSED)
        assert origin is not None
        return ((b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED)

    def allows(self, origin: bytes | None) -> bool:
        return origin is not None and (self._is_any or origin in self._origins)


def preflight_headers(methods: Sequence[str], asked: bytes | None) -> Headers:
    """Headers that answer a preflight, beside `Cors.headers`. methods: those of the path. asked: names of the headers
    that the page wants to send; None: it sends no unusual ones."""
    headers = [
        (b"access-control-allow-methods", ", ".join(methods).encode()),
        (b"access-control-max-age", b"%d" % PREFLIGHT_KEPT_S),
    ]
    if asked is not None and _NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    return headers
