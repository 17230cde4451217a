"""The chart as `helm` renders it: each combination of values once in a run."""

import hashlib
import json
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from _pytest.mark.structures import ParameterSet

from tests.unit.deploy.branches import BRANCHES

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm"
PRESETS = ("", "values-demo.yaml", "values-gpu-small.yaml", "values-production.yaml")
HELM = Path(sysconfig.get_path("scripts")) / "helm"
"""The program of the dev group's helm-binary."""
RELEASE = "rel"
NAMESPACE = "llm"
APIS = (
    *("ray.io/v1/RayService", "gateway.networking.k8s.io/v1/HTTPRoute", "cert-manager.io/v1/Certificate"),
    *(f"monitoring.coreos.com/v1/{kind}" for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")),
)
IMAGE = "registry.example.com/penstock"


class Rendered(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    @property
    def objects(self) -> list[Object]:
        assert self.returncode == 0, self.stderr
        return [found for found in yaml.load_all(self.stdout, Loader=yaml.CSafeLoader) if found]


@cache
def template(
    preset: str = "",
    values: str = "",
    apis: tuple[str, ...] = APIS,
    image: str = IMAGE,
    release: str = RELEASE,
    chart: Path = CHART,
    *options: str,
    is_kept: bool = False,
) -> Rendered:
    """preset: a values file of the chart; values: YAML over it. is_kept: what is made must be kept, which a rendering
    without a cluster can't promise."""
    files = ["-f", str(CHART / preset)] if preset else []
    versions = [word for api in apis for word in ("--api-versions", api)]
    command = [
        str(HELM),
        "template",
        release,
        str(chart),
        "--namespace",
        NAMESPACE,
        "--set",
        f"image.repository={image}",
        *(() if is_kept else ("--set", "secrets.makeWithoutCluster=true")),
        *files,
        *versions,
        *options,
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        done = subprocess.run([*command, "-f", file.name], capture_output=True, text=True, check=False, timeout=60)
    return Rendered(done.returncode, done.stdout, done.stderr)


NOTES = """apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data:
  text: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}
"""
"""`helm template` leaves the notes out, and every `helm install` asks a cluster, dry or not. So a template of a copy
has them."""


@cache
def notes(values: str = "") -> str:
    """What an install of the chart says at its end, with YAML over its values."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(shutil.copytree(CHART, Path(folder) / "penstock"))
        (chart / "templates" / "notes.yaml").write_text(NOTES, encoding="utf-8")
        return str(find(template("", values, chart=chart).objects, "ConfigMap", "notes")["data"]["text"])


@cache
def _objects(preset: str, values: str) -> str:
    return json.dumps(template(preset, values).objects)


def objects(preset: str = "", values: str = "") -> list[Object]:
    """What it makes; the caller's own copy."""
    found: list[Object] = json.loads(_objects(preset, values))
    return found


def find(found: list[Object], kind: str, name: str | None = None) -> Object:
    """The one of that kind, and of that name where there are several."""
    fitting = [each for each in found if each["kind"] == kind and (name is None or each["metadata"]["name"] == name)]
    assert len(fitting) == 1, [each["metadata"]["name"] for each in found if each["kind"] == kind]
    return fitting[0]


def every_case() -> list[ParameterSet]:
    """Presets and branches, to parametrize a test with preset and values."""
    presets = [pytest.param(preset, "", id=preset or "values.yaml") for preset in PRESETS]
    return [*presets, *(pytest.param("", values, id=name) for name, values in BRANCHES.items())]


class Pod(NamedTuple):
    owner: str
    """Kind and name of what makes it; for Ray's pods the group too."""
    labels: dict[str, str]
    spec: Object
    replicas: int


def pods(found: list[Object]) -> Iterator[Pod]:
    """Every pod that the objects ask for, Ray's with the labels that KubeRay adds."""
    for each in found:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield Pod(
                name,
                each["spec"]["template"]["metadata"]["labels"],
                each["spec"]["template"]["spec"],
                each["spec"].get("replicas", 1),
            )
        elif each["kind"] == "CronJob":
            job = each["spec"]["jobTemplate"]["spec"]["template"]
            yield Pod(name, job["metadata"]["labels"], job["spec"], 1)
        elif each["kind"] == "Pod":
            yield Pod(name, each["metadata"]["labels"], each["spec"], 1)
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                group_name = group.get("groupName", "headgroup")
                labels = {
                    **group["template"]["metadata"]["labels"],
                    "ray.io/group": group_name,
                    "ray.io/cluster": "c",
                    "ray.io/is-ray-node": "yes",
                }
                yield Pod(f"{name} {group_name}", labels, group["template"]["spec"], group.get("replicas", 1))


def containers(pod: Pod) -> list[Object]:
    return [*pod.spec.get("initContainers", []), *pod.spec["containers"]]


def digest(found: Object) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
