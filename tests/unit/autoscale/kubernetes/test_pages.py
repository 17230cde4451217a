import asyncio

import httpx
import pytest

from penstock.autoscale.kubernetes.pages import Pages
from penstock.base.metrics import Metrics


def get(pages: Pages, path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(pages), base_url="http://test") as http:
            return await http.get(path)

    return asyncio.run(main())


@pytest.mark.parametrize(("is_leader", "expected"), [(True, "1.0"), (False, "0.0")])
def test_the_metrics_say_who_leads(is_leader: bool, expected: str) -> None:
    page = get(Pages(Metrics(), "scaling", lambda: is_leader), "/metrics").text

    assert f'penstock_autoscaler_is_leader{{lease="scaling"}} {expected}' in page


def test_a_leader_whose_turns_do_not_end_is_not_well() -> None:
    now = 0.0
    pages = Pages(Metrics(), "scaling", lambda: True, lambda: now)

    now = 59.0
    assert get(pages, "/healthz").status_code == 200
    now = 61.0
    assert get(pages, "/healthz").status_code == 503
    pages.note_turn()
    assert get(pages, "/healthz").status_code == 200


def test_who_waits_is_well_however_long() -> None:
    now = 0.0
    pages = Pages(Metrics(), "scaling", lambda: False, lambda: now)
    now = 1e6

    assert get(pages, "/healthz").status_code == 200


def test_nothing_else_is_served() -> None:
    assert get(Pages(Metrics(), "scaling", lambda: False), "/").status_code == 404
