"""The chart, installed in a namespace that admits restricted pods only."""

import base64
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.e2e.images import Images
from tests.e2e.kube import Kube

CHART = "deploy/helm"
PRESET = "deploy/helm/values-demo.yaml"
INSTALL_S = 300
READY_S = 300
GONE_S = 300
STORAGE_CLASS = "e2e"
IS_ENCRYPTED = bool(os.environ.get("PENSTOCK_TEST_TLS"))
"""Whether the installation that most tests use encrypts its streams and its API."""
VOLUMES = 6


class Release(NamedTuple):
    kube: Kube
    name: str
    namespace: str
    images: Images
    is_encrypted: bool = False

    @property
    def service(self) -> str:
        """Name of the API's Service, and the RayService's name too."""
        return f"{self.name}-penstock"

    def kubectl(self, *arguments: str, timeout_s: float = 120.0) -> str:
        return self.kube.kubectl("--namespace", self.namespace, *arguments, timeout_s=timeout_s)

    def helm(self, *arguments: str, timeout_s: float = INSTALL_S + 60.0) -> str:
        return self.kube.run("helm", *arguments, "--namespace", self.namespace, timeout_s=timeout_s)

    def values(self, *more: str, preset: str | Path = PRESET) -> list[str]:
        """Options of install and upgrade: the preset, and this run's images. more: values as `--set` takes them, or
        `name={"...": ...}` with JSON, which keeps fractions numbers."""
        penstock, redis = (name.rpartition(":") for name in (self.images.penstock, self.images.redis))
        sets = (
            f"image.repository={penstock[0]}",
            f"image.tag={penstock[2]}",
            f"redis.image.repository={redis[0]}",
            f"redis.image.tag={redis[2]}",
            *((f"tls.{each}=true" for each in ("stream", "gateway")) if self.is_encrypted else ()),
            *more,
        )
        return [
            "--values",
            str(preset),
            *(word for each in sets for word in (_set_option(each), each)),
        ]

    def url(self) -> str:
        """URL of the API for clients without the cluster's DNS."""
        spec = self.kube.get("service", self.service, "--namespace", self.namespace)["spec"]
        return f"{self.scheme}://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    @property
    def scheme(self) -> str:
        return "https" if self.is_encrypted else "http"

    def save_ca(self, path: Path) -> None:
        """Writes the CA of the API's certificate."""
        secret = self.kube.get("secret", f"{self.service}-tls-http", "--namespace", self.namespace)
        path.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))

    def ends(self, service: str) -> list[str]:
        """URLs behind a Service that has no address of its own."""
        slices = self.kube.get(
            "endpointslices", "--selector", f"kubernetes.io/service-name={service}", "--namespace", self.namespace
        )["items"]
        return [
            f"{self.scheme}://{address}:{found['ports'][0]['port']}"
            for found in slices
            for end in found["endpoints"]
            for address in end["addresses"]
        ]

    def key(self, tenant: str = "demo") -> str:
        return self.kubectl(
            "get",
            "secret",
            f"{self.service}-tenants",
            "--output",
            f'go-template={{{{index .data "{tenant}" | base64decode}}}}',
        )

    def penstock(self, *command: str) -> str:
        """A command of an operator, in a gateway's pod."""
        return self.kubectl("exec", f"service/{self.service}", "--", "penstock", *command)

    def pods(self, component: str) -> list[str]:
        """Names of the component's pods, without those that are ending."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found = self.kube.get("pods", "--selector", selector, "--namespace", self.namespace)["items"]
        return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def image(self, pod: str) -> str:
        return str(self.kube.get("pod", pod, "--namespace", self.namespace)["spec"]["containers"][0]["image"])

    def active(self) -> str:
        """The active Ray cluster."""
        status = self.kube.get("rayservice", self.service, "--namespace", self.namespace)["status"]
        return str(status["activeServiceStatus"]["rayClusterName"])

    def wait_ready(self, timeout_s: int = READY_S) -> None:
        self.kubectl(
            "wait",
            f"rayservice/{self.service}",
            "--for=condition=Ready",
            f"--timeout={timeout_s}s",
            timeout_s=timeout_s + 10,
        )

    def account(self) -> str:
        """What a person would look at first when something is wrong."""
        looks = (
            ["get", "pods", "--output=wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["get", f"rayservice/{self.service}", "--output=jsonpath={.status}"],
            ["logs", f"--selector=app.kubernetes.io/instance={self.name}", "--all-containers", "--prefix", "--tail=30"],
        )
        said = []
        for arguments in looks:
            command = self.kube.enter("kubectl", "--namespace", self.namespace, *arguments)
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            said.append(f"--- kubectl {' '.join(arguments)}\n{done.stdout[-6000:]}{done.stderr[-1000:]}")
        return "\n".join(said)


@contextmanager
def namespace(kube: Kube) -> Iterator[str]:
    """The name of one that nobody has had, and that goes with all that is in it; it need not be there. Releases go
    first: KubeRay can't end its clusters in a namespace that ends."""
    name = f"penstock-{uuid.uuid4().hex[:6]}"
    try:
        yield name
    finally:
        for release in kube.run("helm", "list", "--short", "--namespace", name).split():
            kube.run(
                "helm",
                "uninstall",
                release,
                "--namespace",
                name,
                "--wait",
                f"--timeout={GONE_S}s",
                timeout_s=GONE_S + 60.0,
            )
        if kube.kubectl("get", "namespace", name, "--ignore-not-found"):
            kube.kubectl(
                "wait",
                "pods",
                "--all",
                "--namespace",
                name,
                "--for=delete",
                f"--timeout={GONE_S}s",
                timeout_s=GONE_S + 60.0,
            )
            kube.kubectl("delete", "namespace", name, "--wait=false")


def storage(kube: Kube, folder: Path) -> None:
    """Volumes on the node's disk, each for one claim, and the default class that has them; nothing where the cluster is
    somebody's, or has them."""
    if kube.own is None or any(
        each["metadata"].get("annotations", {}).get("storageclass.kubernetes.io/is-default-class") == "true"
        for each in kube.get("storageclass")["items"]
    ):
        return
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"}
    kube.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS, "annotations": annotations},
            "provisioner": "kubernetes.io/no-provisioner",
        }
    )
    for name in (f"volume-{number}" for number in range(VOLUMES)):
        path = folder / name
        path.mkdir()
        path.chmod(0o777)
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": STORAGE_CLASS,
            "hostPath": {"path": str(path)},
        }
        kube.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})


def _set_option(value: str) -> str:
    if "tag=" in value:
        return "--set-string"
    return "--set-json" if '={"' in value else "--set"


def install(release: Release, *values: str, chart: str | Path = CHART, preset: str | Path = PRESET) -> None:
    """Installs the release as docs/kubernetes.md says."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    release.kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": release.namespace, "labels": labels}}
    )
    options = release.values(*values, preset=preset)
    release.helm("install", release.name, str(chart), *options, "--wait", f"--timeout={INSTALL_S}s")
    release.wait_ready()
