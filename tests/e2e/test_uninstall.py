"""The end of the installation that the other tests used: what is left is what the notes say, and their command removes
it."""

import re

import pytest

from tests.e2e.kube import until
from tests.e2e.release import Release

pytestmark = pytest.mark.timeout(600)


def test_uninstall_leaves_what_the_notes_say(release: Release) -> None:
    notes = release.helm("get", "notes", release.name)
    until(
        lambda: not starting(release),
        "no pod is starting any more: one that waits for Ray's head takes its whole grace period to end",
    )
    release.helm("uninstall", release.name, "--wait", "--timeout=300s")
    for kind in ("rayservices", "rayclusters", "pods"):
        release.kubectl("wait", kind, "--all", "--for=delete", "--timeout=180s", timeout_s=200)
    kinds = set(release.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split())
    left = release.kubectl("get", ",".join(sorted(kinds - PASSING)), "--ignore-not-found", "--output=name").split()

    command = re.search(rf"kubectl (delete --namespace {release.namespace} .*)", notes)
    assert command is not None
    assert command[1].split()[3:] == ["pvc/demo-penstock-adapters"]
    assert set(left) == {
        "configmap/kube-root-ca.crt",
        "serviceaccount/default",
        "persistentvolumeclaim/demo-penstock-adapters",
    }
    release.kubectl(*command[1].split())


PASSING = {"events", "events.events.k8s.io", "endpoints"}
"""What goes by itself, or is deprecated beside another kind."""


def starting(release: Release) -> list[str]:
    """Pods whose init containers run."""
    return release.kubectl("get", "pods", "--field-selector=status.phase=Pending", "--output=name").split()
