"""Response headers: those of a receipt, and those of errors."""

import math
from collections.abc import Sequence

from penstock.base.errors import PenstockError
from penstock.router.routing.request import Receipt
from penstock.router.routing.tiers import STAY
from penstock.wire.errors import RateLimited, Unauthenticated

Headers = Sequence[tuple[bytes, bytes]]


def receipt_headers(receipt: Receipt) -> Headers:
    """Headers with the decision, as far as it is known at the first token. The request id is on every response and not
    among them."""
    headers = [
        (b"x-penstock-tier", _value(receipt.tier)),
        (b"x-penstock-tier-reason", _value(receipt.tier_reason)),
        (b"x-penstock-replica", _value(receipt.replica)),
        (b"x-penstock-cached-tokens", b"%d" % receipt.cached_tokens),
    ]
    if receipt.stays:
        headers.append((b"x-penstock-stay", STAY.encode()))
    if receipt.predicted_ttft_s is not None:
        headers.append((b"x-penstock-predicted-ttft-ms", b"%.1f" % (1000 * receipt.predicted_ttft_s)))
    return headers


def error_headers(error: BaseException) -> Headers:
    """Headers that go with an error: WWW-Authenticate, Retry-After, and those about limits."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, PenstockError) and error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    if isinstance(error, RateLimited):
        headers += error.headers
    return headers


def _value(text: str) -> bytes:
    """The text as a header value, which is printable latin-1 (RFC 9110, 5.5)."""
    plain = text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
    return plain.encode("latin-1", "replace")
