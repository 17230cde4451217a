from typing import Any

from starlette.types import Message

from penstock.base.metrics import Metrics
from penstock.router.api.pages import METRICS_BURST, METRICS_RATE, Pages
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.receipts import Receipts
from penstock.router.config import GatewayConfig
from penstock.router.transport.exchange import Exchange


class Scraped:
    """The pages of a gateway without anything behind it, and how often its metrics were rendered."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_rendered = 0
        unused: Any = None
        self.pages = Pages(
            GatewayDependencies(
                GatewayConfig(),
                {},
                unused,
                unused,
                unused,
                Metrics(),
                list,
                refresh=self._count,
                clock=lambda: self.now_s,
            ),
            Receipts(1),
        )

    async def scrape(self) -> bytes:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        unused: Any = None
        scope = {"method": "GET", "path": "/metrics", "headers": []}
        await self.pages.metrics(Exchange(scope, unused, send, "r", self.now_s))
        assert messages[0]["status"] == 200
        page: bytes = messages[1]["body"]
        return page

    def _count(self) -> None:
        self.num_rendered += 1


async def test_a_flood_of_scrapes_is_rendered_at_a_bounded_rate_and_answered_all_the_same() -> None:
    subject = Scraped()
    pages = {await subject.scrape() for _ in range(10 * int(METRICS_BURST))}

    assert subject.num_rendered == METRICS_BURST
    assert all(b"penstock_replicas" in page for page in pages)
    subject.now_s += 2 / METRICS_RATE
    for _ in range(10):
        await subject.scrape()
    assert subject.num_rendered == METRICS_BURST + 2


async def test_a_scrape_now_and_then_is_always_new() -> None:
    subject = Scraped()
    for count in range(1, 100):
        await subject.scrape()
        subject.now_s += 1 / METRICS_RATE

        assert subject.num_rendered == count
