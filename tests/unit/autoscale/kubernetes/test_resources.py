"""What is kept of objects as Kubernetes and KubeRay write them."""

from typing import Any

import pytest

from penstock.autoscale.kubernetes.resources import pod_of
from penstock.autoscale.starts import PodTimes

CREATED, PLACED, RAN = "2026-11-24T03:00:00Z", "2026-11-24T03:00:40Z", "2026-11-24T03:02:10Z"


def pod(status: str = "True", containers: list[dict[str, Any]] | None = None) -> Any:
    running = [{"name": "ray", "state": {"running": {"startedAt": RAN}}}]
    conditions = [
        {"type": "Ready", "status": "False"},
        {"type": "PodScheduled", "status": status, "lastTransitionTime": PLACED},
    ]
    return pod_of(
        {
            "metadata": {"name": "p", "creationTimestamp": CREATED},
            "status": {"conditions": conditions, "containerStatuses": running if containers is None else containers},
        }
    )


def test_a_pod_tells_how_long_it_took_to_get_a_node_and_until_its_container_ran() -> None:
    assert pod().times == PodTimes(schedule_s=40.0, image_s=90.0)


@pytest.mark.parametrize("containers", [[], [{"name": "ray", "state": {"waiting": {"reason": "ErrImagePull"}}}]])
def test_a_pod_whose_container_does_not_run_yet_tells_no_times(containers: list[dict[str, Any]]) -> None:
    assert pod(containers=containers).times is None
    assert pod(status="False").times is None
