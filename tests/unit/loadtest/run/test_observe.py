"""The server's replicas over time, from its /metrics."""

import asyncio
from collections.abc import Sequence

from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.results.series import Observed
from penstock_loadtest.run.observe import TRIES, observe, read_replicas

PAGE = b"""# HELP penstock_replicas Replicas that take requests.
# TYPE penstock_replicas gauge
penstock_replicas{pool="small",tier="edge"} 2.0
penstock_replicas{tier="cloud",pool="large"} 0
penstock_replicas_ready{pool="small",tier="edge"} 9
other_total 12
"""
OTHER = b"vllm:num_requests_running 3\n"


def observed(pages: Sequence[tuple[int, bytes] | None], *, until: int) -> tuple[list[Observed], int]:
    """The samples noted of these answers (None: none came), and the number of requests to the server; stopped after
    `until` requests."""
    requests = 0
    noted: list[Observed] = []

    async def main() -> None:
        enough = asyncio.Event()

        async def get(url: str, timeout_s: float) -> tuple[int, bytes]:
            nonlocal requests
            requests += 1
            if requests >= until:
                enough.set()
            page = pages[min(requests, len(pages)) - 1]
            if page is None:
                raise TargetUnreachable("It is gone.")
            return page

        task = asyncio.create_task(
            observe(get, "http://there/metrics", lambda: float(requests), noted.append, period_s=0.0)
        )
        waiting = asyncio.create_task(enough.wait())
        await asyncio.wait((task, waiting), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)

    asyncio.run(main())
    return noted, requests


def test_replicas_are_read_by_pool_and_tier() -> None:
    assert read_replicas(PAGE) == {"small/edge": 2.0, "large/cloud": 0.0}


def test_series_that_differ_in_other_labels_add_up() -> None:
    page = (
        b'penstock_replicas{pool="a",tier="edge",node="x"} 1\npenstock_replicas{pool="a",tier="edge",node="y}z"} 2e0\n'
    )

    assert read_replicas(page) == {"a/edge": 3.0}


def test_a_page_without_the_metric_reports_nothing() -> None:
    assert read_replicas(OTHER) == {}
    assert read_replicas(b'penstock_replicas{pool="a",tier="b"} many\n') == {}
    assert read_replicas(b"\xff\xfe") == {}


def test_what_the_server_reports_is_noted_with_its_time() -> None:
    noted, _ = observed([(200, PAGE)], until=3)

    assert [each.t_s for each in noted[:2]] == [0.0, 1.0]
    assert noted[0].replicas == {"small/edge": 2.0, "large/cloud": 0.0}


def test_a_server_that_reports_nothing_is_soon_left_alone() -> None:
    for silence in ((404, b""), (200, OTHER)):
        assert observed([silence], until=50) == ([], TRIES)


def test_a_server_that_is_away_for_a_while_is_read_again() -> None:
    noted, _ = observed([(200, PAGE), *[None] * 5, (200, PAGE)], until=8)

    assert len(noted) >= 2
