"""A hundred adapters on eight slots: who is popular stays, nobody fails, and a hot adapter is where the load is.

The replicas play steps of a given time; adapters, files, slots and streams are real.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Self

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ADAPTERS, NUM_SLOTS, NUM_REPLICAS = 100, 4, 2
NUM_REQUESTS, AT_ONCE, SKEW = 800, 16, 1.0
CONFIG = """
gateway: {{port: {port}}}
adapters: {{max_per_tenant: 128}}
pools:
  - name: demo
    served_names: [demo]
    replicas: 2
    engine: {{runner: timed, max_num_seqs: 16, adapters: {{slots: 4}}, timed: {{base_s: 0.005, num_blocks: 4096}}}}
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def uploaded(platform: PlatformProcess) -> PlatformProcess:
    """The platform with adapters a0, a1 and so on, of different numbers."""
    config = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]})
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    with httpx.Client(
        base_url=platform.url, headers={"authorization": f"Bearer {platform.key}"}, timeout=60, trust_env=False
    ) as client:
        for number in range(NUM_ADAPTERS):
            ones = np.ones((1, 576), dtype=np.float32)
            weights = save({f"{name}.lora_A.weight": number * ones, f"{name}.lora_B.weight": ones.T.copy()})
            files = [("file", (CONFIG_FILE, config.encode())), ("file", (WEIGHTS_FILE, weights))]
            response = client.post("/v1/adapters", data={"name": f"a{number}"}, files=files)
            assert response.status_code == 201, response.text
    return platform


class Client:
    """Asks a platform's adapters."""

    def __init__(self, platform: PlatformProcess) -> None:
        self.http = httpx.AsyncClient(
            base_url=f"{platform.url}/v1",
            headers={"authorization": f"Bearer {platform.key}"},
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self._platform = platform

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def answer(self, adapter: str, max_tokens: int = 8) -> int:
        """Status of a request with an adapter."""
        body = {"model": adapter, "prompt": "The sea is", "max_tokens": max_tokens, "ignore_eos": True}
        return (await self.http.post("/completions", json=body)).status_code

    async def answers(self, adapters: list[str], at_once: int, max_tokens: int = 8) -> list[int]:
        """Statuses of requests, of which so many are under way at once."""
        turns = asyncio.Semaphore(at_once)

        async def answer(adapter: str) -> int:
            async with turns:
                return await self.answer(adapter, max_tokens)

        return await asyncio.gather(*(answer(adapter) for adapter in adapters))

    async def described(self, adapter: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"/adapters/{adapter}")).json()
        return found

    def counted(self, name: str, **labels: str) -> float:
        return self._platform.metric(name, pool="demo", **labels)


def hit_rate(uses: list[dict[str, int]]) -> float:
    """Share of the uses of some adapters that found theirs in a slot."""
    hits = sum(each["hits"] for each in uses)
    return hits / (hits + sum(each["waits"] for each in uses))


async def test_a_hundred_adapters_on_eight_slots_under_a_zipf_load_fail_nobody(
    uploaded: PlatformProcess, record_property: Callable[[str, object], None]
) -> None:
    random = Random(1)
    async with Client(uploaded) as client:
        weights = list(itertools.accumulate(1 / (rank + 1) ** SKEW for rank in range(NUM_ADAPTERS)))
        wanted = [f"a{rank}" for rank in random.choices(range(NUM_ADAPTERS), cum_weights=weights, k=NUM_REQUESTS)]
        used_before = client.counted("penstock_adapter_uses_total")
        hits_before = client.counted("penstock_adapter_uses_total", outcome="hit")
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        statuses = await client.answers(wanted, AT_ONCE)

        took_s = loop.time() - began_s
        described = [await client.described(f"a{number}") for number in range(NUM_ADAPTERS)]
        hits = client.counted("penstock_adapter_uses_total", outcome="hit") - hits_before
        record_property("hit_rate", round(hits / NUM_REQUESTS, 3))
        record_property("seconds", round(took_s, 1))
        assert statuses == [200] * NUM_REQUESTS
        assert client.counted("penstock_adapter_uses_total") - used_before == NUM_REQUESTS, "each counts once"
        assert hits / NUM_REQUESTS >= 0.12, "a choice that knows nothing finds one in twelve"
        uses = [each["uses"] for each in described]
        assert sum(each["hits"] + each["waits"] for each in uses) == NUM_REQUESTS
        assert [uses[number]["hits"] + uses[number]["waits"] for number in range(8)] == [
            wanted.count(f"a{number}") for number in range(8)
        ]
        resident = [each["replicas"]["loaded"] for each in described]
        assert sum(resident) == NUM_SLOTS * NUM_REPLICAS
        assert hit_rate(uses[:4]) > 1.5 * hit_rate(uses[20:]), "who is popular stays"
        assert sum(each["loads"] - each["evictions"] for each in uses) == sum(resident)
        assert client.counted("penstock_adapter_loads_total") - sum(resident) == client.counted(
            "penstock_adapter_evictions_total"
        )


async def test_a_hot_adapter_is_spread_over_the_replicas_and_leaves_them_when_it_is_cold(
    uploaded: PlatformProcess,
) -> None:
    async with Client(uploaded) as client:
        others = [f"a{number}" for number in range(1, 13)]

        async def where() -> list[str]:
            found: list[str] = (await client.described("a0"))["replicas"]["where"]
            return found

        async def cool() -> None:
            for _ in range(40):
                if not await where():
                    return
                assert await client.answers(others, len(others)) == [200] * len(others)
            pytest.fail("the adapter stays in slots though nobody uses it")

        await cool()
        assert await client.answer("a0") == 200
        alone = await where()
        assert await client.answers(["a0"] * 64, 64, max_tokens=200) == [200] * 64
        spread = await where()
        await cool()

        assert len(alone) == 1
        assert len(spread) == 2
        assert set(alone) < set(spread)
