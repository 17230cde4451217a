"""The connections that are allowed, by the chart's NetworkPolicies."""

from typing import Any

import pytest

from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import objects
from tests.unit.deploy.network import End, Flow, ends, is_allowed, policies_of

DEMO = objects("values-demo.yaml")
OURS = ends(DEMO)
GATEWAY, POOL, HEAD, REDIS, AUTOSCALER, TENANTS, TEST = (
    OURS[name] for name in ("gateway", "pool-edge", "head", "redis", "autoscaler", "tenants", "test")
)


def stranger(name: str, namespace: str, **labels: str) -> End:
    return End(name, namespace, labels, {"kubernetes.io/metadata.name": namespace})


TENANT = stranger("a tenant", "apps", app="chat")
NEIGHBOUR = stranger("a pod of the same namespace", "llm", app="other")
OPERATOR = stranger("KubeRay's operator", "kuberay", **{"app.kubernetes.io/name": "kuberay-operator"})
PROMETHEUS = stranger("Prometheus", "monitoring", app="prometheus")
DNS = stranger("DNS", "kube-system", **{"k8s-app": "kube-dns"})
INTERNET = End("the internet", address="203.0.113.7")
METADATA = End("the cloud's metadata", address="169.254.169.254")
API = End("Kubernetes' API", address="10.96.0.1")
CLIENT = End("a client through a load balancer", address="198.51.100.4")

RAY_REDIS = ends(objects("values-production.yaml"))["ray-redis"]

ALLOWED = [
    Flow(TENANT, GATEWAY, 8000),
    Flow(NEIGHBOUR, GATEWAY, 8000),
    Flow(CLIENT, GATEWAY, 8000),
    Flow(TEST, GATEWAY, 8000),
    Flow(GATEWAY, POOL, 41234),  # the token stream
    Flow(GATEWAY, HEAD, 6379),  # Ray's GCS
    Flow(POOL, HEAD, 6379),
    Flow(HEAD, POOL, 10002),
    Flow(HEAD, GATEWAY, 52365),
    Flow(POOL, GATEWAY, 10003),
    Flow(GATEWAY, REDIS, 6379),
    Flow(POOL, REDIS, 6379),
    Flow(HEAD, REDIS, 6379),
    Flow(AUTOSCALER, REDIS, 6379),
    Flow(TENANTS, REDIS, 6379),
    Flow(AUTOSCALER, API, 443),
    Flow(OPERATOR, HEAD, 8265),
    Flow(PROMETHEUS, GATEWAY, 8001),
    Flow(PROMETHEUS, POOL, 8080),
    Flow(PROMETHEUS, AUTOSCALER, 8081),
    *(Flow(end, DNS, 53, "UDP") for end in (GATEWAY, POOL, HEAD, AUTOSCALER, TENANTS, TEST)),
]
FORBIDDEN = [
    Flow(TENANT, REDIS, 6379),
    Flow(NEIGHBOUR, REDIS, 6379),
    Flow(TENANT, HEAD, 8265),
    Flow(TENANT, HEAD, 6379),
    Flow(TENANT, HEAD, 10001),
    Flow(TENANT, POOL, 41234),
    Flow(TENANT, GATEWAY, 8001),  # admin
    Flow(TENANT, GATEWAY, 52365),
    Flow(TENANT, GATEWAY, 9),  # KubeRay's own Service
    Flow(NEIGHBOUR, HEAD, 8265),
    Flow(NEIGHBOUR, POOL, 41234),
    Flow(PROMETHEUS, HEAD, 8265),
    Flow(PROMETHEUS, REDIS, 6379),
    Flow(OPERATOR, REDIS, 6379),
    Flow(OPERATOR, POOL, 41234),
    Flow(AUTOSCALER, HEAD, 8265),
    Flow(AUTOSCALER, GATEWAY, 8000),
    Flow(TENANTS, GATEWAY, 8000),
    Flow(TENANTS, API, 443),
    Flow(TEST, REDIS, 6379),
    Flow(TEST, GATEWAY, 8001),
    Flow(POOL, INTERNET, 443),
    Flow(POOL, METADATA, 80),
    Flow(POOL, API, 443),
    Flow(GATEWAY, INTERNET, 443),
    Flow(GATEWAY, API, 443),
    Flow(HEAD, INTERNET, 443),
    Flow(HEAD, API, 443),
    Flow(REDIS, INTERNET, 443),
    Flow(REDIS, GATEWAY, 8000),
    Flow(REDIS, DNS, 53, "UDP"),
    Flow(TENANT, AUTOSCALER, 8081),
]


def names(flow: Flow) -> str:
    return f"{flow.source.name} to {flow.target.name}:{flow.port}"


def test_what_has_to_talk_may() -> None:
    policies = policies_of(DEMO)

    assert [names(flow) for flow in ALLOWED if not is_allowed(policies, flow)] == []


def test_what_has_no_business_there_may_not() -> None:
    policies = policies_of(DEMO)

    assert len(FORBIDDEN) >= 12
    assert [names(flow) for flow in FORBIDDEN if is_allowed(policies, flow)] == []


def test_every_pod_is_selected_for_both_directions() -> None:
    for policy in policies_of(DEMO):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all(
        not is_allowed(policies_of(DEMO), Flow(end, INTERNET, 25))
        and not is_allowed(policies_of(DEMO), Flow(TENANT, end, 25))
        for end in OURS.values()
    )


def test_without_policies_everything_is_open() -> None:
    found = objects("", BRANCHES["no autoscaler"])

    assert policies_of(found) == []
    assert is_allowed([], FORBIDDEN[0])


def test_another_release_is_a_stranger() -> None:
    other = GATEWAY._replace(labels={**(GATEWAY.labels or {}), "app.kubernetes.io/instance": "other"})

    assert not is_allowed(policies_of(DEMO), Flow(other, REDIS, 6379))
    assert not is_allowed(policies_of(DEMO), Flow(other, POOL, 41234))


def test_clients_are_bounded_where_they_are_named() -> None:
    found = objects("values-production.yaml")
    gateway, policies = ends(found)["gateway"], policies_of(found)

    assert is_allowed(policies, Flow(stranger("the ingress", "ingress-nginx"), gateway, 8000))
    assert not is_allowed(policies, Flow(TENANT, gateway, 8000))


def test_a_download_opens_the_hub_and_nothing_inside() -> None:
    found = objects("", BRANCHES["downloads"])
    policies = policies_of(found)

    for name in ("gateway", "pool-a", "head"):
        assert is_allowed(policies, Flow(ends(found)[name], INTERNET, 443))
        assert not is_allowed(policies, Flow(ends(found)[name], INTERNET, 80))
        assert not is_allowed(policies, Flow(ends(found)[name], METADATA, 443))


def test_a_provider_opens_its_port_to_gateways_only() -> None:
    found = objects("", BRANCHES["providers"])
    policies, known = policies_of(found), ends(found)

    assert is_allowed(policies, Flow(known["gateway"], INTERNET, 443))
    assert is_allowed(policies, Flow(known["gateway"], stranger("the provider inside", "other"), 8080))
    assert not is_allowed(policies, Flow(known["gateway"], stranger("another inside", "apps"), 8080))
    assert not is_allowed(policies, Flow(known["pool-demo"], INTERNET, 443))


def test_places_of_adapters_open_their_ports_to_gateways_only() -> None:
    found = objects("", BRANCHES["places of adapters"])
    policies, known = policies_of(found), ends(found)
    store = stranger("the store inside", "other")

    for port in (443, 80, 8080, 8081, 9000):
        assert is_allowed(policies, Flow(known["gateway"], store, port)), port
    assert is_allowed(policies, Flow(known["gateway"], INTERNET, 443))
    assert not is_allowed(policies, Flow(known["gateway"], store, 22))
    assert not is_allowed(policies, Flow(known["gateway"], METADATA, 80))
    assert not is_allowed(policies, Flow(known["pool-demo"], store, 9000))


def test_a_hub_of_adapters_opens_443_alone() -> None:
    found = objects("", BRANCHES["a hub of adapters"])
    policies, gateway = policies_of(found), ends(found)["gateway"]

    assert is_allowed(policies, Flow(gateway, INTERNET, 443))
    assert not is_allowed(policies, Flow(gateway, INTERNET, 80))
    assert not is_allowed(policies, Flow(gateway, METADATA, 443))


@pytest.mark.parametrize(("branch", "port"), [("outer redis", 6380), ("outer redis, anybody", 6379)])
def test_an_outer_redis_is_reached_on_its_port(branch: str, port: int) -> None:
    found = objects("", BRANCHES[branch])
    outer = End("redis", address="192.0.2.10")

    assert is_allowed(policies_of(found), Flow(ends(found)["gateway"], outer, port))
    assert not is_allowed(policies_of(found), Flow(ends(found)["gateway"], outer, 22))


def test_dns_is_where_the_values_say_and_nowhere_else() -> None:
    found = objects("", BRANCHES["outer redis"])
    policies, gateway = policies_of(found), ends(found)["gateway"]

    assert is_allowed(policies, Flow(gateway, stranger("OpenShift's DNS", "openshift-dns"), 5353, "UDP"))
    assert is_allowed(policies, Flow(gateway, End("NodeLocal DNS", address="169.254.20.10"), 53, "UDP"))
    assert not is_allowed(policies, Flow(gateway, DNS, 53, "UDP"))
    assert not is_allowed(policies, Flow(gateway, stranger("OpenShift's DNS", "openshift-dns"), 22))
    assert is_allowed(policies_of(objects("", BRANCHES["outer redis, anybody"])), Flow(gateway, INTERNET, 53, "UDP"))


def test_who_labels_himself_as_the_operator_is_refused_where_its_namespace_is_named() -> None:
    impostor = stranger("a tenant's pod", "apps", **{"app.kubernetes.io/name": "kuberay-operator"})
    found = objects("", BRANCHES["outer redis"])

    assert is_allowed(policies_of(found), Flow(OPERATOR, ends(found)["head"], 8265))
    assert not is_allowed(policies_of(found), Flow(impostor, ends(found)["head"], 8265))
    assert is_allowed(policies_of(DEMO), Flow(impostor, HEAD, 8265)), "so the document says: name it"


def test_without_peers_a_collector_and_an_outer_redis_are_anybody_on_their_ports() -> None:
    """The document says so."""
    found = objects("", BRANCHES["outer redis, anybody"])
    policies, known = policies_of(found), ends(found)

    assert is_allowed(policies, Flow(known["pool-demo"], INTERNET, 443)), "the collector's port"
    assert is_allowed(policies, Flow(known["pool-demo"], INTERNET, 6379)), "Redis' port"
    assert not is_allowed(policies, Flow(known["pool-demo"], INTERNET, 80))
    named = objects("", BRANCHES["outer redis"])
    assert not is_allowed(policies_of(named), Flow(ends(named)["pool-demo"], INTERNET, 4318))
    assert not is_allowed(policies_of(named), Flow(ends(named)["pool-demo"], INTERNET, 6380))


POLICY: dict[str, Any] = {
    "metadata": {"namespace": "llm"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []},
}


def only(rule: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**POLICY, "spec": {**POLICY["spec"], "ingress": [rule]}}]


def test_the_evaluator_reads_rules_as_kubernetes_does() -> None:
    flow = Flow(TENANT, NEIGHBOUR, 80)

    assert not is_allowed([POLICY], flow), "selected, and no rule"
    assert is_allowed(only({}), flow), "an empty rule is everything"
    assert not is_allowed(only({"from": [{"podSelector": {}}]}), flow), (
        "a pod selector alone is of the policy's namespace"
    )
    assert is_allowed(only({"from": [{"namespaceSelector": {}}]}), flow)
    assert not is_allowed(
        only({"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}]}), flow
    ), "both in one peer must hold"
    assert is_allowed(
        only({"from": [{"podSelector": {"matchLabels": {"app": "x"}}}, {"namespaceSelector": {}}]}), flow
    ), "one of several peers is enough"
    assert is_allowed(only({"ports": [{"port": 70, "endPort": 90}]}), flow)
    assert not is_allowed(only({"ports": [{"port": 80, "protocol": "UDP"}]}), flow)
    assert not is_allowed(only({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.244.0.0/16"]}}]}), flow)
    assert is_allowed(
        only({"from": [{"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}}]}),
        flow,
    )


def test_where_others_are_denied_nobody_reaches_the_gateways_but_who_is_named() -> None:
    production = policies_of(objects("values-production.yaml"))
    closed = policies_of(objects("values-production.yaml", "networkPolicy: {clients: []}"))
    ingress = stranger("the ingress", "ingress-nginx", app="nginx")

    assert is_allowed(production, Flow(ingress, GATEWAY, 8000))
    assert not any(is_allowed(closed, Flow(end, GATEWAY, 8000)) for end in (ingress, TENANT, NEIGHBOUR, CLIENT))
    assert is_allowed(closed, Flow(TEST, GATEWAY, 8000))


def test_rays_own_redis_is_for_its_head_alone() -> None:
    policies = policies_of(objects("values-production.yaml"))

    assert is_allowed(policies, Flow(HEAD, RAY_REDIS, 6379))
    for end in (GATEWAY, POOL, AUTOSCALER, TENANTS, TENANT, NEIGHBOUR):
        assert not is_allowed(policies, Flow(end, RAY_REDIS, 6379)), end.name
