"""The end of the installation that the other tests used: what is left is what the notes say, and their command removes it."""

import re

import pytest

from tests.e2e.kube import until
from tests.e2e.release import Release

pytestmark = pytest.mark.timeout(600)


def test_uninstall_leaves_what_the_notes_say(release: Release) -> None:
    notes = release.helm("get", "notes", release.name)
    until(lambda: not starting(release), "no pod is starting any more: one that waits for Ray's head takes its whole grace period to end")
    release.helm("uninstall", release.name, "--wait", "--timeout=300s")
    for kind in ("rayservices", "rayclusters", "pods"):
        release.kubectl("wait", kind, "--all", "--for=delete", "--timeout=180s", timeout_s=200)
    workloads = "pods,services,deployments,statefulsets,jobs,rayservices,rayclusters"
    others = "configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,pvc"
    left = release.kubectl("get", f"{workloads},{others}", "--output=name").split()

    command = re.search(r"kubectl (delete --namespace penstock .*)", notes)
    assert command is not None
    assert command[1].split()[3:] == ["pvc/demo-penstock-adapters"]
    assert set(left) == {"configmap/kube-root-ca.crt", "serviceaccount/default", "persistentvolumeclaim/demo-penstock-adapters"}
    release.kubectl(*command[1].split())


def starting(release: Release) -> list[str]:
    """Pods whose init containers run."""
    return release.kubectl("get", "pods", "--field-selector=status.phase=Pending", "--output=name").split()
