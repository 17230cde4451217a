"""docs/kubernetes.md, command by command, as a reader would give them."""

import re
from pathlib import Path

import pytest

from tests.e2e.images import Images
from tests.e2e.kube import ROOT, Kube
from tests.e2e.release import namespace, storage

pytestmark = pytest.mark.timeout(900)

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_S = 660.0
NAMESPACE = "penstock"
"""The document's. Here it is another one, which nobody has."""


def commands(namespace: str) -> list[str]:
    """Commands that a reader can give on any cluster; KubeRay's installation is one of the cluster's own."""
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", "").splitlines() if line.strip()]
    return [
        re.sub(rf"(--namespace|create namespace|label namespace) {NAMESPACE}(?![-\w])", rf"\1 {namespace}", line)
        for line in lines
    ]


def test_every_command_of_the_document_works(kube: Kube, built: Images, tmp_path: Path) -> None:
    """The image of Redis is the test's own, in what installs: the cluster has no way to a registry."""
    storage(kube, tmp_path)
    penstock, redis = (name.rpartition(":") for name in built)
    redis_image = f"--set redis.image.repository={redis[0]} --set-string redis.image.tag={redis[2]}"
    helm = f'helm() {{ case $1 in install) command helm "$@" {redis_image};; *) command helm "$@";; esac; }}'
    with namespace(kube) as own:
        given = commands(own)
        script = "\n".join(
            ["set -euo pipefail", f"export IMAGE={penstock[0]} TAG={penstock[2]}", helm, "set -x", *given, "echo done"]
        )
        said = kube.run("bash", "-m", "-c", script, timeout_s=COMMAND_S)
    answers = [line for line in said.splitlines() if '"chat.completion"' in line]

    assert len(given) > 15
    assert not [line for line in given if re.search(rf"namespace {NAMESPACE}(?![-\w])", line)]
    assert len(answers) == 1
    assert "Paris" in answers[0]
    assert said.splitlines()[-1] == "done"
