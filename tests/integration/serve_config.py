"""A RayService's serveConfigV2 on a Ray of its own, deployed as Ray's REST API does it; run as a process by
test_kubernetes_apps. Prints JSON.

python -m tests.integration.serve_config TEMP_DIR PORT
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.schema import ServeDeploySchema

from bench.support.platform_process import read_metric
from penstock.autoscale.remote import RemoteServe
from penstock.base.redis import connect
from penstock.tenancy.keys import create_key
from penstock.wire.serve_agent import AppPlaces

POOL: dict[str, Any] = {
    "name": "played",
    "served_names": ["played"],
    "autoscale": {"max_replicas": 3},
    "engine": {"runner": "timed", "timed": {"base_s": 0.02, "num_blocks": 512}},
}
RESOURCES = {"gateway": 1, "serve_agent": 1, "pool-played": 3}
"""As worker groups have them, altogether."""


def config(port: int, base_s: float = 0.02) -> dict[str, Any]:
    pool = {**POOL, "engine": {**POOL["engine"], "timed": {"base_s": base_s, "num_blocks": 512}}}
    platform = {"gateway": {"port": port}, "pools": [POOL]}
    names = "penstock.cli.serve_apps"
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "gateway",
                "route_prefix": None,
                "import_path": f"{names}:gateway",
                "args": {"config": platform, "replicas": 1, "drain_s": 20},
            },
            {
                "name": "pool-played",
                "route_prefix": None,
                "import_path": f"{names}:pool",
                "args": {"pool": pool, "adapters": None, "drain_s": 20},
                "external_scaler_enabled": True,
            },
            {
                "name": "serve-agent",
                "route_prefix": None,
                "import_path": f"{names}:serve_agent",
                "args": {"config": platform},
            },
        ],
    }


def deploy(wanted: dict[str, Any]) -> None:
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.apply_config.remote(ServeDeploySchema.model_validate(wanted)))


class Play:
    def __init__(self, port: int) -> None:
        self._port = port
        self._client = connect(os.environ["PENSTOCK_REDIS_URL"])
        self._serve = RemoteServe(self._client, {"played": "pool-played"}, lambda: "local", lambda: 1)
        self._key = ""

    async def go(self) -> dict[str, Any]:
        deploy(config(self._port))
        await until(lambda: all(app.status.value == "RUNNING" for app in serve.status().applications.values()))
        self._key = await create_key(self._client, bytes.fromhex(os.environ["PENSTOCK_CLUSTER_SECRET"]), "acme")
        first = await self._settled(1)
        answer = await self._ask()

        await self._serve.read()
        await self._serve.set_target("played", 3)
        grown = await self._settled(3)
        oldest = grown.replicas[0]
        await self._serve.read()
        is_done = await self._serve.step_down("played", (oldest.replica_id,), 2)
        shrunk = await self._settled(2)
        await self._serve.remember(await self._serve.locate("local"))

        streaming = asyncio.create_task(self._stream())
        await asyncio.sleep(0.5)
        deploy(config(self._port, base_s=0.03))
        rolled = await self._settled(2, but=[replica.replica_id for replica in shrunk.replicas])
        return {
            "first": first,
            "answer": answer,
            "grown": grown,
            "done": is_done,
            "oldest": oldest.replica_id,
            "shrunk": shrunk,
            "rolled": rolled,
            "stream": await streaming,
        }

    async def _settled(self, count: int, but: list[str] | None = None) -> AppPlaces:
        """The pool, when so many replicas run, none of `but` is left, and a gateway reaches them."""
        async with asyncio.timeout(90):
            while True:
                pool = next(app for app in await self._serve.locate("local") if app.app == "pool-played")
                is_so = [replica.state for replica in pool.replicas] == ["RUNNING"] * count
                if (
                    is_so
                    and not {replica.replica_id for replica in pool.replicas} & set(but or ())
                    and await self._num_reached() == count
                ):
                    return pool
                await asyncio.sleep(0.1)

    async def _num_reached(self) -> int:
        async with httpx.AsyncClient(trust_env=False) as http:
            page = (await http.get(f"http://127.0.0.1:{self._port}/metrics")).text
        return round(read_metric(page, "penstock_replicas") or 0)

    def _body(self, **changes: Any) -> dict[str, Any]:
        return {"model": "played", "prompt": "water and power", "max_tokens": 8, "ignore_eos": True, **changes}

    async def _ask(self) -> int:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            headers = {"authorization": f"Bearer {self._key}"}
            return (
                await http.post(f"http://127.0.0.1:{self._port}/v1/completions", json=self._body(), headers=headers)
            ).status_code

    async def _stream(self) -> str:
        """The last line of an answer that takes about ten seconds."""
        async with httpx.AsyncClient(
            trust_env=False, timeout=60, headers={"authorization": f"Bearer {self._key}"}
        ) as http:
            lines = []
            async with http.stream(
                "POST", f"http://127.0.0.1:{self._port}/v1/completions", json=self._body(max_tokens=400, stream=True)
            ) as response:
                lines = [line async for line in response.aiter_lines() if line]
            return lines[-1]


async def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, serve.status()
        await asyncio.sleep(0.1)


def main() -> None:
    ray.init(
        address="local",
        num_cpus=8,
        resources=RESOURCES,
        include_dashboard=False,
        namespace="penstock-test",
        object_store_memory=96 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _temp_dir=sys.argv[1],
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        found = asyncio.run(Play(int(sys.argv[2])).go())
        sys.stdout.write(
            json.dumps(found, default=lambda struct: {name: getattr(struct, name) for name in struct.__struct_fields__})
            + "\n"
        )
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
