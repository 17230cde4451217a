"""The server's replicas while it is loaded, read from its /metrics once a second. A server that does not report them is
left alone."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.results.series import Observed

METRIC = "penstock_replicas"
PERIOD_S = 1.0
TIMEOUT_S = 2.0
TRIES = 3
"""Pages in a row without the metric after which it is not requested any more."""

Get = Callable[[str, float], Awaitable[tuple[int, bytes]]]
"""Status and body of a URL, within so many seconds; raises TargetUnreachable."""

_LINE = re.compile(rf"^{METRIC}\{{(?P<labels>.*)\}}\s+(?P<value>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\b", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_replicas(page: bytes) -> dict[str, float]:
    """Replicas by "pool/tier" (summed over other labels) in a page of the Prometheus text format; empty: it does not
    report them."""
    replicas: dict[str, float] = {}
    if METRIC.encode() in page:
        for line in _LINE.finditer(page.decode("utf-8", errors="replace")):
            labels = dict(_LABEL.findall(line["labels"]))
            name = f"{labels.get('pool', '')}/{labels.get('tier', '')}"
            replicas[name] = replicas.get(name, 0.0) + float(line["value"])
    return replicas


async def observe(
    get: Get, url: str, now: Callable[[], float], note: Callable[[Observed], None], *, period_s: float = PERIOD_S
) -> None:
    """Read the replicas until cancelled, or until the server turns out not to report any. One request at a time,
    however slow the answers are."""
    silent = 0
    while silent < TRIES:
        requested_s = now()
        try:
            status, page = await get(url, TIMEOUT_S)
        except TargetUnreachable:
            status, page = 0, b""
        replicas = read_replicas(page) if status == 200 else {}
        if replicas:
            note(Observed(t_s=round(requested_s, 6), replicas=replicas))
        silent = 0 if replicas or not status else silent + 1
        await asyncio.sleep(max(0.0, requested_s + period_s - now()))
