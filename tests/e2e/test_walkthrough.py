"""docs/kubernetes.md, command by command, as a reader would give them."""

import re
from pathlib import Path

import pytest

from tests.e2e.images import Images
from tests.e2e.kube import ROOT, Kube
from tests.e2e.release import storage

pytestmark = pytest.mark.timeout(900)

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_S = 660.0
NAMESPACE = "penstock"
"""The document's."""


def commands() -> list[str]:
    """Those that a reader can give on any cluster; KubeRay's installation is one of the cluster's own."""
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return [line for block in BLOCK.findall(text) for line in block.replace("\\\n", "").splitlines() if line.strip()]


def test_every_command_of_the_document_works(kube: Kube, built: Images, tmp_path: Path) -> None:
    """The image of Redis is the test's own, in what installs: the cluster has no way to a registry."""
    storage(kube, tmp_path)
    kube.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=COMMAND_S)
    penstock, redis = (name.rpartition(":") for name in built)
    redis_image = f"--set redis.image.repository={redis[0]} --set-string redis.image.tag={redis[2]}"
    helm = f'helm() {{ case $1 in install) command helm "$@" {redis_image};; *) command helm "$@";; esac; }}'
    script = "\n".join(["set -euo pipefail", f"export IMAGE={penstock[0]} TAG={penstock[2]}", helm, "set -x", *commands(), "echo done"])
    said = kube.run("bash", "-m", "-c", script, timeout_s=COMMAND_S)

    assert len(commands()) > 15
    assert "Paris" in said
    assert said.splitlines()[-1] == "done"
