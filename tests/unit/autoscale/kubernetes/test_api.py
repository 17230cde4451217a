import asyncio
from pathlib import Path

import httpx
import pytest

from penstock.autoscale.kubernetes.api import Account, Api, ApiAway
from penstock.base.metrics import Metrics
from tests.unit.autoscale.kubernetes.api_fake import FakeServer


def test_every_call_counts_by_verb_resource_and_status(tmp_path: Path) -> None:
    metrics, server = Metrics(), FakeServer()
    (tmp_path / "token").write_text("a-token", encoding="ascii")

    async def main() -> None:
        account = Account("https://api.test", tmp_path)
        async with Api(
            account, server, lambda verb, kind, status: metrics.kubernetes_calls.labels(verb, kind, status).inc()
        ) as api:
            await api.find("/api/v1/namespaces/n/pods")
            server.script.append(httpx.ConnectError("refused"))
            with pytest.raises(ApiAway):
                await api.get("/api/v1/namespaces/n/pods/one")

    asyncio.run(main())
    page = metrics.render().decode()
    assert 'penstock_kubernetes_calls_total{code="200",resource="pods",verb="list"} 1.0' in page
    assert 'penstock_kubernetes_calls_total{code="away",resource="pods",verb="get"} 1.0' in page
