"""What runs inside Ray Serve's controller on our behalf: reading a pool's state, and a step down with a victim of our
choice.

Serve has no call for either. Lowering the target alone lets Serve choose: fewest replicas on a node, then the newest. A
victim that ends by itself before the target is lowered is replaced at once, and one that ends after it costs a second
replica. So both happen in one turn of the controller's event loop, by the two steps that Serve's own scaling takes: the
victim is stopped gracefully, as any replica that Serve stops, and the target is lowered by as many. Everything here
rests on private names of Ray, hence the narrow version range; it is sent there by `__ray_call__`, and imports of this
module must stay light.
"""

from typing import Any

from penstock.autoscale.observation import ServeState


def read(controller: Any, deployment_ids: list[Any]) -> list[ServeState | None]:
    """State of each deployment as Serve has it now. It is None if Serve does not know that deployment (yet, or any
    more), or is still recovering it: a controller that was replaced queries the replicas that it finds, and until each
    has answered it would take them for ones that are only starting."""
    states = controller.deployment_state_manager._deployment_states
    return [
        _serve_state_of(states[deployment_id]) if deployment_id in states else None for deployment_id in deployment_ids
    ]


def locate(controller: Any, deployment_ids: list[Any]) -> list[tuple[int, list[tuple[str, str, str | None]]] | None]:
    """Target and, oldest first, id, state and node address of every replica; None as for `read`."""
    states = controller.deployment_state_manager._deployment_states
    return [_places_of(states[deployment_id]) if deployment_id in states else None for deployment_id in deployment_ids]


def step_down(controller: Any, deployment_id: Any, victims: tuple[str, ...], target: int) -> bool:
    """Stop the victims gracefully and lower the target by as many, to `target`. Returns False, and does nothing, if the
    target has changed meanwhile, or if a victim no longer runs."""
    manager = controller.deployment_state_manager
    state = manager._deployment_states.get(deployment_id)
    if state is None or state.target_num_replicas != target + len(victims):
        return False
    found = [
        replica.replica_id
        for replica in state._replicas.get()
        if _is_running(replica) and replica.replica_id.unique_id in victims
    ]
    if len(found) != len(victims):
        return False
    state.stop_replicas(found)
    manager.set_target_num_replicas(deployment_id, target)
    return True


def _serve_state_of(state: Any) -> ServeState | None:
    replicas = state._replicas.get()
    states = [replica.actor_details.state.value for replica in replicas]
    if "RECOVERING" in states:
        return None
    return ServeState(
        target=state.target_num_replicas,
        running=tuple(replica.replica_id.unique_id for replica in sorted(replicas, key=_age) if _is_running(replica)),
        num_starting=sum(name in ("STARTING", "UPDATING") for name in states),
        num_stopping=states.count("STOPPING"),
    )


def _places_of(state: Any) -> tuple[int, list[tuple[str, str, str | None]]] | None:
    replicas = sorted(state._replicas.get(), key=_age)
    found = [
        (replica.replica_id.unique_id, replica.actor_details.state.value, replica.actor_details.node_ip)
        for replica in replicas
    ]
    return None if any(name == "RECOVERING" for _, name, _ in found) else (state.target_num_replicas, found)


def _is_running(replica: Any) -> bool:
    return bool(replica.actor_details.state.value == "RUNNING")


def _age(replica: Any) -> float:
    return float(replica.actor_details.start_time_s)
