"""The header by which a request stays on the edge, from the socket to the provider, where bytes are counted."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import msgspec
import pytest

from bench.support.counting_relay import CountingRelay
from penstock.router.config import GatewayConfig, PoolSpec, ProviderConfig
from penstock.router.models.catalogue import Checkpoint, build_served_models
from penstock.tenancy.keys import record_of
from penstock.tenancy.tenants import Record, Settings, settings_key
from penstock.wire.frames import Delta, Finish
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.unit.router.fleet_fakes import Cluster, FakeMember, FakeReplica
from tests.unit.router.http_fakes import MODEL, SECRET, TOKENIZER, World, running_gateway

STAY = {"x-penstock-stay": "edge"}
EDGE, EDGE_2, CLOUD = FakeMember("e", "edge"), FakeMember("e2", "edge"), FakeMember("c", "cloud")
CLOUD_ONLY = "large"
KEYS = {policy: f"sk-penstock-{number:048x}" for number, policy in enumerate(("cloud_first", "edge_first"), 1)}
"""Key of a tenant of each policy."""
QUICK = Behaviour(models=["huge"], ttft_s=Lengths(constant=0.002), gap_s=Lengths(constant=0.001))
SPECS = [
    msgspec.convert(
        {
            "name": name,
            "served_names": names,
            "tier": name,
            "model": "demo",
            "app_name": name,
            "max_model_len": 1000,
        },
        PoolSpec,
    )
    for name, names in (("edge", [MODEL]), ("cloud", [MODEL, CLOUD_ONLY]))
]
MIN_REFUSED = 20
"""Requests that are refused before any is answered, where many are asked at once."""
MESSAGES = [{"role": "user", "content": "Capital of France?"}]
POSTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "The capital is", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Capital of France?", "max_output_tokens": 4},
}
READS: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


@dataclass
class Leaky:
    """A gateway from which requests may leave by two ways: to a pool of the cloud, and to a provider that counts."""

    world: World
    cluster: Cluster
    provider: CountingRelay
    may_step: asyncio.Event
    """Replicas answer while it is set."""

    @property
    def has_left(self) -> bool:
        return bool(self.provider.num_connections or self.provider.num_bytes or self.cluster.replicas["c"].submits)

    async def post(
        self, path: str = "/v1/chat/completions", policy: str = "cloud_first", model: str = MODEL, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"authorization": f"Bearer {KEYS[policy]}", **named}
        body = {"model": model, **(POSTS | READS)[path]}
        return await self.world.client.post(path, json=body, headers=sent)


@asynccontextmanager
async def leaky(config: GatewayConfig | None = None, within_s: float = 60.0) -> AsyncIterator[Leaky]:
    """Replicas answer by themselves, a token every few milliseconds."""
    async with FakeServer(QUICK) as server, CountingRelay(server.url) as relay:
        provider = msgspec.convert(
            {"name": "up", "base_url": relay.url, "model": "huge", "served_names": [MODEL], "ttft_s": 0.01},
            ProviderConfig,
        )
        models = build_served_models(SPECS, [provider], {"demo": Checkpoint(TOKENIZER, "digest")}, lambda _: 1000)
        async with (
            asyncio.timeout(within_s),
            Cluster(EDGE, EDGE_2, CLOUD, providers=[provider], config=config) as cluster,
            running_gateway(dispatcher=cluster.dispatcher, models=models, providers=[provider], config=config) as world,
        ):
            for policy, key in KEYS.items():
                name, value = record_of(SECRET, policy, key)
                record = Record(settings=Settings(tier_policy=policy), created=0, updated=0)
                world.store.data |= {name: value, settings_key(policy): msgspec.json.encode(record)}
            may_step = asyncio.Event()
            may_step.set()
            stepping = asyncio.ensure_future(_step(cluster, may_step))
            try:
                yield Leaky(world, cluster, relay, may_step)
            finally:
                stepping.cancel()


async def _step(cluster: Cluster, may_step: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(0.001)
        await may_step.wait()
        for replica in cluster.replicas.values():
            if replica.is_up and replica.running and not replica.is_closed:
                replica.send(*[_next_letter(replica, sid) for sid in list(replica.running)])
                replica.report()


def _next_letter(replica: FakeReplica, sid: int) -> Delta:
    running = replica.running[sid]
    running.num_output += 1
    is_done = running.num_output >= running.submit.sampling.max_tokens
    if is_done:
        del replica.running[sid]
    first, running.is_begun = not running.is_begun, True
    return Delta(sid, [65], Finish.LENGTH if is_done else None, num_cached_tokens=0 if first else None)


async def test_a_request_of_a_cloud_first_tenant_that_stays_is_answered_by_the_edge() -> None:
    async with leaky() as found:
        for path in POSTS:
            found.cluster.replicas["e"].report(prefill_tokens_outstanding=100_000)
            found.cluster.replicas["e2"].report(prefill_tokens_outstanding=100_000)
            answer = await found.post(path, x_penstock_stay="edge")

            assert answer.status_code == 200, answer.text
            assert (answer.headers["x-penstock-tier"], answer.headers["x-penstock-tier-reason"]) == (
                "edge",
                "only_tier",
            )
            assert answer.headers["x-penstock-stay"] == "edge"
            assert not found.has_left
            receipt = await found.world.client.get(
                f"/v1/receipts/{answer.headers['x-penstock-request-id']}",
                headers={"authorization": f"Bearer {KEYS['cloud_first']}"},
            )
            assert receipt.json()["choices"][0]["stay"] == "edge"


async def test_without_the_header_it_leaves() -> None:
    async with leaky() as found:
        answer = await found.post()

        assert answer.headers["x-penstock-tier"] == "cloud"
        assert "x-penstock-stay" not in answer.headers
        assert found.has_left


async def test_any_other_value_is_refused_before_anything_leaves() -> None:
    async with leaky() as found:
        for path in (*POSTS, *READS):
            for value in ("cloud", "", "Edge", "edge, edge", "true"):
                answer = await found.post(path, x_penstock_stay=value)

                assert answer.status_code == 400, answer.text
                assert "x-penstock-stay" in answer.json()["error"]["message"]
        assert not found.has_left


async def test_two_values_are_refused_if_one_of_them_is_wrong() -> None:
    async with leaky() as found:
        headers = [
            ("authorization", f"Bearer {KEYS['cloud_first']}"),
            ("x-penstock-stay", "edge"),
            ("x-penstock-stay", "cloud"),
        ]
        answer = await found.world.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)

        assert answer.status_code == 400
        assert not found.has_left


async def test_a_model_that_only_the_cloud_serves_is_refused_with_a_sentence_about_the_header() -> None:
    async with leaky() as found:
        answer = await found.post(model=CLOUD_ONLY, x_penstock_stay="edge")

        assert answer.status_code == 403
        assert "'x-penstock-stay: edge'" in answer.json()["error"]["message"]
        assert not found.has_left


@pytest.mark.parametrize(
    "num_requests",
    [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_nothing_leaves_of_many_requests_that_stay_while_replicas_die_and_the_queue_is_full(
    num_requests: int, record_property: Callable[[str, object], None]
) -> None:
    config = GatewayConfig(max_queue=24, queue_timeout_s=2.0)
    async with leaky(config, within_s=num_requests / 5) as found:
        paths = ("/v1/chat/completions", "/v1/messages")
        asked = [(path, policy) for path in paths for policy in KEYS] * (num_requests // 4)
        statuses: Counter[int] = Counter()

        async def ask_in_turn() -> None:
            while asked:
                answer = await found.post(*asked.pop(), x_penstock_stay="edge")
                statuses[answer.status_code] += 1
                if statuses[429] + statuses[503] == MIN_REFUSED:
                    found.may_step.set()
                if answer.status_code == 200:
                    assert answer.headers["x-penstock-tier"] == "edge"
                else:
                    await asyncio.sleep(0.1)

        found.may_step.clear()  # until the queue is full, however fast the machine serves
        killing = asyncio.ensure_future(_kill_in_turn(found.cluster))
        await asyncio.gather(*(ask_in_turn() for _ in range(60)))
        killing.cancel()

        record_property("statuses", dict(statuses))
        assert statuses.total() == num_requests
        assert statuses[200] >= 10, statuses
        assert statuses[429] + statuses[503] >= MIN_REFUSED, f"no overload: {statuses}"
        assert (found.provider.num_connections, found.provider.num_bytes) == (0, 0)
        assert not found.cluster.replicas["c"].submits
        left = await asyncio.gather(*(found.post() for _ in range(8)))
        assert {answer.headers["x-penstock-tier"] for answer in left} == {"cloud"}, "the way out was open"


async def _kill_in_turn(cluster: Cluster) -> None:
    """One of the edge's replicas dies, then the other; each comes back while the other is down."""
    for number in itertools.count():
        dying, other = [cluster.replicas[name] for name in (("e", "e2") if number % 2 else ("e2", "e"))]
        await asyncio.sleep(0.5)
        other.is_up = True
        if dying.is_up and not dying.is_closed:
            dying.die()
