"""Reading Serve's state; how it changes a real one is tested by tests/integration/test_autoscale.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.autoscale.observation import ServeState
from penstock.autoscale.serve_controller import read


def controller(*replicas: tuple[str, str, float], target: int = 2) -> Any:
    """A controller that has one deployment, "a". replicas: id, state, start time."""
    found = [
        SimpleNamespace(
            replica_id=SimpleNamespace(unique_id=name),
            actor_details=SimpleNamespace(state=SimpleNamespace(value=state), start_time_s=start_s),
        )
        for name, state, start_s in replicas
    ]
    state = SimpleNamespace(target_num_replicas=target, _replicas=SimpleNamespace(get=lambda: found))
    return SimpleNamespace(deployment_state_manager=SimpleNamespace(_deployment_states={"a": state}))


def test_running_replicas_come_oldest_first_and_others_are_counted() -> None:
    found = read(
        controller(
            ("new", "RUNNING", 2.0), ("old", "RUNNING", 1.0), ("next", "STARTING", 3.0), ("last", "STOPPING", 0.0)
        ),
        ["a", "unknown"],
    )

    assert found == [ServeState(2, ("old", "new"), num_starting=1, num_stopping=1), None]


@pytest.mark.parametrize("other", ["RUNNING", "STARTING"])
def test_a_pool_whose_replicas_are_being_found_again_is_left_out(other: str) -> None:
    assert read(controller(("found", "RECOVERING", 1.0), ("b", other, 1.0)), ["a"]) == [None]
