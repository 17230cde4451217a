"""The way to a pool's target: Ray Serve's external scaler, and a victim of our choice on the way down.

Works from any process of the cluster, without Serve's REST port and so without the dashboard. Serve's controller
remembers the target and sees to it from then on; nothing of ours has to go on running for it.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from penstock.autoscale import serve_controller
from penstock.autoscale.observation import ServeState
from penstock.wire.discovery import GATEWAY_APP, REPLICA_DEPLOYMENT
from penstock.wire.serve_agent import AppPlaces, Place

CALL_S = 5.0

T = TypeVar("T")


class ServeActuator:
    """Calls to Serve's controller. Each raises what Ray raises, ValueError while there is no controller, and
    TimeoutError."""

    def __init__(self, apps: Mapping[str, str]) -> None:
        """apps: Serve application of each pool; each is deployed with `external_scaler_enabled`."""
        self._deployments = {
            pool: DeploymentID(name=GATEWAY_APP if app == GATEWAY_APP else REPLICA_DEPLOYMENT, app_name=app)
            for pool, app in apps.items()
        }

    async def read(self) -> dict[str, ServeState]:
        """State of the pools that Serve knows, but for those whose replicas it is recovering."""
        controller = await asyncio.to_thread(_controller)
        found = await _answer(controller.__ray_call__.remote(serve_controller.read, list(self._deployments.values())))
        return {pool: state for pool, state in zip(self._deployments, found, strict=True) if state is not None}

    async def locate(self) -> list[AppPlaces]:
        """Places of all replicas."""
        controller = await asyncio.to_thread(_controller)
        found = await _answer(controller.__ray_call__.remote(serve_controller.locate, list(self._deployments.values())))
        rows = [
            (deployment.app_name, *row)
            for deployment, row in zip(self._deployments.values(), found, strict=True)
            if row is not None
        ]
        return [AppPlaces(app, target, [Place(*place) for place in places]) for app, target, places in rows]

    async def set_target(self, pool: str, target: int) -> None:
        """Sets the target and leaves the rest to Serve: it starts what is missing, and stops what does not run yet,
        then the newest."""
        controller = await asyncio.to_thread(_controller)
        await _answer(controller.update_deployment_replicas.remote(self._deployments[pool], target))

    async def step_down(self, pool: str, victims: tuple[str, ...], target: int) -> bool:
        """Drains and ends those victims, and sets the target to `target`. Returns False if the state has changed; then
        nothing was done."""
        controller = await asyncio.to_thread(_controller)
        return bool(
            await _answer(
                controller.__ray_call__.remote(serve_controller.step_down, self._deployments[pool], victims, target)
            )
        )


def _controller() -> Any:
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


async def _answer(call: Awaitable[T]) -> T:
    async with asyncio.timeout(CALL_S):
        return await call
