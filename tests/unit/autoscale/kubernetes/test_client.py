import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiException, CoordinationV1Api, CoreV1Api

from penstock.autoscale.kubernetes.client import NO_ANSWER, describe, is_unavailable, name_call
from penstock.autoscale.kubernetes.mirror import list_pods
from penstock.base.metrics import Metrics
from tests.unit.autoscale.kubernetes.api_fake import FakeServer, client_of


async def test_every_call_counts_by_verb_resource_and_status(tmp_path: Path) -> None:
    metrics, server = Metrics(), FakeServer()

    async with client_of(
        server, tmp_path, lambda verb, kind, status: metrics.kubernetes_calls.labels(verb, kind, status).inc()
    ) as client:
        await list_pods(client, "n", "a=b")()
        server.script.append(None)
        with pytest.raises(ApiException) as raised:
            await CoreV1Api(client).read_namespaced_pod("one", "n")
        assert is_unavailable(raised.value)
    page = metrics.render().decode()
    assert 'penstock_kubernetes_calls_total{code="200",resource="pods",verb="list"} 1.0' in page
    assert 'penstock_kubernetes_calls_total{code="away",resource="pods",verb="get"} 1.0' in page


@pytest.mark.parametrize(
    ("method", "url", "named"),
    [
        ("GET", "https://k/api/v1/nodes", ("list", "nodes")),
        ("GET", "https://k/api/v1/nodes/n1", ("get", "nodes")),
        ("GET", "https://k/api/v1/namespaces/n/pods?labelSelector=a%3Db", ("list", "pods")),
        (
            "GET",
            "https://k/apis/ray.io/v1/namespaces/n/rayclusters?timeoutSeconds=60&watch=true",
            ("watch", "rayclusters"),
        ),
        ("PATCH", "https://k/apis/ray.io/v1/namespaces/n/rayclusters/c", ("patch", "rayclusters")),
        ("GET", "https://k/apis/coordination.k8s.io/v1/namespaces/n/leases/l", ("get", "leases")),
        ("PUT", "https://k/apis/coordination.k8s.io/v1/namespaces/n/leases/l", ("update", "leases")),
        ("POST", "https://k/apis/coordination.k8s.io/v1/namespaces/n/leases", ("create", "leases")),
    ],
)
def test_a_call_is_named_as_rbac_names_it(method: str, url: str, named: tuple[str, str]) -> None:
    assert name_call(method, url) == named


async def test_a_connection_that_breaks_is_an_error_of_the_caller_and_nothing_is_sent_again(tmp_path: Path) -> None:
    """aiohttp alone would repeat a GET over a connection that it had kept open."""
    server = FakeServer()
    async with client_of(server, tmp_path) as client:
        await list_pods(client, "n", "a=b")()
        server.script.append(None)

        with pytest.raises(ApiException) as raised:
            await list_pods(client, "n", "a=b")()

    assert len(server.seen) == 2
    assert raised.value.status == NO_ANSWER
    assert describe(raised.value) == "GET /api/v1/namespaces/n/pods: ClientConnectionError"


async def test_a_server_that_does_not_answer_costs_the_time_of_one_call(tmp_path: Path) -> None:
    class Silent(FakeServer):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            return web.Response()

    async with client_of(Silent(), tmp_path, call_s=0.05) as client:
        with pytest.raises(ApiException) as raised:
            await CoordinationV1Api(client).read_namespaced_lease("l", "n")

    assert is_unavailable(raised.value)


async def test_the_token_is_read_again_when_kubernetes_has_replaced_it(tmp_path: Path) -> None:
    tokens: list[str] = []

    class Guard(FakeServer):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            tokens.append(request.headers["authorization"])
            return await super().answer(request)

    async with client_of(Guard(), tmp_path) as client:
        await list_pods(client, "n", "a=b")()
        (tmp_path / "token").write_text("another\n", encoding="ascii")
        await list_pods(client, "n", "a=b")()

    assert tokens == ["Bearer a-token", "Bearer another"]


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (403, '{"message": "no right"}', "403 Forbidden: no right"),
        (502, "<html>", "502 Bad Gateway: "),
        (500, "[]", "500 Internal Server Error: "),
    ],
)
def test_an_answer_is_described_in_one_line(status: int, body: str, line: str) -> None:
    reason = line.partition(" ")[2].partition(":")[0]

    assert describe(ApiException(status=status, reason=reason, body=body)) == line
