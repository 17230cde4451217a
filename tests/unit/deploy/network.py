"""What NetworkPolicies allow, worked out from the objects: the test cluster stores them and enforces none.

As the API's reference has it: a pod that no policy selects for a direction is open there; else some rule of some policy
that does must name the other side and the port. A connection needs both its source's egress and its target's ingress.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.unit.deploy.charts import NAMESPACE, Pod, pods

Object = dict[str, Any]


class End(NamedTuple):
    """A pod, or, without labels, an address outside."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] | None = None
    namespace_labels: Mapping[str, str] = {}
    ports: Mapping[str, int] = {}
    """Port numbers by name: a policy may say the name."""
    address: str = "10.244.0.9"


class Flow(NamedTuple):
    source: End
    target: End
    port: int
    protocol: str = "TCP"


def end_of(pod: Pod, namespace: str = NAMESPACE) -> End:
    """A pod that the chart makes."""
    ports = {
        port["name"]: port["containerPort"]
        for container in pod.spec["containers"]
        for port in container.get("ports", [])
    }
    return End(pod.owner, namespace, pod.labels, {"kubernetes.io/metadata.name": namespace}, ports)


def ends(found: list[Object]) -> dict[str, End]:
    """One pod of each component; pools by their group."""
    known = {}
    for pod in pods(found):
        component = pod.labels["app.kubernetes.io/component"]
        known[pod.labels["ray.io/group"] if component == "pool" else component] = end_of(pod)
    return known


def is_allowed(policies: Sequence[Object], flow: Flow) -> bool:
    return _direction(policies, flow, flow.source, flow.target, "Egress") and _direction(
        policies, flow, flow.target, flow.source, "Ingress"
    )


def _direction(policies: Sequence[Object], flow: Flow, end: End, other: End, way: str) -> bool:
    if end.labels is None:
        return True
    selecting = [policy for policy in policies if way in policy["spec"]["policyTypes"] and _selects(policy, end)]
    if not selecting:
        return True
    key = "to" if way == "Egress" else "from"
    rules = [
        (rule, policy["metadata"]["namespace"])
        for policy in selecting
        for rule in policy["spec"].get(way.lower()) or ()
    ]
    return any(
        _names_peer(rule.get(key), other, namespace) and _names_port(rule.get("ports"), flow)
        for rule, namespace in rules
    )


def _selects(policy: Object, end: End) -> bool:
    return (
        policy["metadata"]["namespace"] == end.namespace
        and end.labels is not None
        and _matches(policy["spec"]["podSelector"], end.labels)
    )


def _names_peer(peers: Sequence[Object] | None, other: End, namespace: str) -> bool:
    return not peers or any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: Object, other: End, namespace: str) -> bool:
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], ipaddress.ip_address(other.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(each) for each in block.get("except", ())
        )
    if other.labels is None:
        return False
    in_namespace = (
        _matches(peer["namespaceSelector"], other.namespace_labels)
        if "namespaceSelector" in peer
        else other.namespace == namespace
    )
    return in_namespace and _matches(peer.get("podSelector", {}), other.labels)


def _names_port(ports: Sequence[Object] | None, flow: Flow) -> bool:
    return not ports or any(_is_port(port, flow) for port in ports)


def _is_port(port: Object, flow: Flow) -> bool:
    if port.get("protocol", "TCP") != flow.protocol:
        return False
    if "port" not in port:
        return True
    first = port["port"]
    if isinstance(first, str):
        return flow.target.ports.get(first) == flow.port
    return int(first) <= flow.port <= int(port.get("endPort") or first)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _fits(each, labels) for each in selector.get("matchExpressions", ())
    )


def _fits(expression: Object, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    return {
        "In": value in expression.get("values", ()),
        "NotIn": value not in expression.get("values", ()),
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[str(expression["operator"])]


def policies_of(found: list[Object], namespace: str = NAMESPACE) -> list[Object]:
    """The policies that the chart makes, in the namespace that they are created in."""
    return [
        {**each, "metadata": {**each["metadata"], "namespace": namespace}}
        for each in found
        if each["kind"] == "NetworkPolicy"
    ]
