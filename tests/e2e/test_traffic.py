"""The NetworkPolicies, beside what was really said: the test cluster enforces none, so each connection that it saw is
judged afterwards."""

import pytest

from tests.e2e.flows import DNS_PORT, POD_NETWORK, Recording, Seen
from tests.e2e.release import Release
from tests.unit.deploy.network import End, Flow, is_allowed

pytestmark = pytest.mark.timeout(120)

METADATA = "169.254.169.254"
"""Where clouds tell a machine about itself. Ray's head asks there which cloud it is in; the policies refuse that,
rightly, and nothing needs it."""
DNS = End("DNS, on the node", "kube-system", {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})


def target_of(seen: Seen, known: dict[str, list[End]]) -> list[tuple[End, int]]:
    """The end that may have been meant: a pod, DNS, or an address outside."""
    if seen.target.startswith(POD_NETWORK):
        return [(end, seen.target_port) for end in known.get(seen.target, [])]
    return [(DNS, DNS_PORT)] if seen.port == DNS_PORT else [(End("outside", address=seen.service), seen.port)]


def test_every_connection_between_pods_is_one_that_the_policies_allow(release: Release, recorded: Recording) -> None:
    policies = release.kube.get("networkpolicies", "--namespace", release.namespace)["items"]
    known = recorded.ends()
    flows = (seen for seen in recorded.flows() if seen.service != METADATA)
    ours = [seen for seen in flows if any(end.namespace == release.namespace for end in known.get(seen.source, []))]
    refused = [
        seen
        for seen in ours
        if not any(
            is_allowed(policies, Flow(source, target, port, seen.protocol))
            for source in known[seen.source]
            for target, port in target_of(seen, known)
        )
    ]
    components = {(end.labels or {}).get("app.kubernetes.io/component") for seen in ours for end in known[seen.source]}

    assert len(policies) == 7
    assert {"gateway", "pool", "head", "autoscaler", "tenants"} <= components, "connections of these were seen"
    assert refused == [], [
        (seen, [end.name for end in (*known[seen.source], *known.get(seen.target, []))]) for seen in refused
    ]
