"""RayCluster and RayService as the autoscaler's tests make them, and the account that acts on them."""

import asyncio
import base64
import json
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubernetes.aio.client.exceptions import NotFoundException

from penstock.autoscale.kubernetes.client import Account
from penstock.autoscale.kubernetes.resources import Document, service_of
from tests.cluster import Cluster
from tests.e2e.objects import Objects

APP = "pool-a"
RAY_CLUSTERS = "/apis/ray.io/v1/namespaces/default/rayclusters"
RAY_SERVICES = "/apis/ray.io/v1/namespaces/default/rayservices"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/scaling"
SERVICE = "platform"
"""Name of the RayService, where there is one."""
RBAC = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: autoscaler}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: autoscaler}
rules:
- {apiGroups: [ray.io], resources: [rayservices], resourceNames: [platform], verbs: [list, watch]}
- {apiGroups: [ray.io], resources: [rayclusters], verbs: [list, watch, patch]}
- {apiGroups: [""], resources: [pods], verbs: [list, watch]}
- {apiGroups: [""], resources: [events], verbs: [create]}
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [scaling], verbs: [get, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: autoscaler}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: autoscaler}
subjects: [{kind: ServiceAccount, name: autoscaler, namespace: default}]
---
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: scaling}
"""


def read_config(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cluster.folder / "kubeconfig").read_text())
    return found


def server_of(cluster: Cluster) -> str:
    return str(read_config(cluster)["clusters"][0]["cluster"]["server"])


def account_of(cluster: Cluster, folder: Path, token: str | None = None) -> Account:
    """token None: the administrator's."""
    config = read_config(cluster)
    folder.mkdir()
    (folder / "ca.crt").write_bytes(base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"]))
    (folder / "token").write_text(token or config["users"][0]["user"]["token"])
    return Account(server_of(cluster), folder)


def ray_cluster_spec(replicas: int) -> Document:
    pod = {"spec": {"containers": [{"name": "ray", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    group = {
        "groupName": APP,
        "replicas": replicas,
        "minReplicas": 0,
        "maxReplicas": 1000,
        "rayStartParams": {},
        "template": pod,
    }
    head = {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "none"}]}}}
    return {"rayVersion": "2.60.0", "headGroupSpec": head, "workerGroupSpecs": [group]}


def a_ray_cluster(cluster: Cluster, replicas: int) -> str:
    """Creates a RayCluster; returns its name, which no other has had."""
    name = f"rc-{uuid.uuid4().hex[:6]}"
    document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name},
        "spec": ray_cluster_spec(replicas),
    }
    cluster.kubectl("create", "-f", "-", given=json.dumps(document))
    return name


async def a_ray_service(cluster: Cluster, api: Objects, replicas: int) -> str:
    """The name of the Ray cluster that KubeRay made for it, which counts as the active one from now on: here nobody
    answers as Ray's dashboard, so KubeRay itself would never call it ready."""
    spec = {"serveConfigV2": "applications: []", "rayClusterConfig": ray_cluster_spec(replicas)}
    document = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": SERVICE}, "spec": spec}
    cluster.kubectl("create", "-f", "-", given=json.dumps(document))
    name = await made(api)
    status = {"activeServiceStatus": {"rayClusterName": name}, "pendingServiceStatus": {"rayClusterName": ""}}
    cluster.kubectl(
        "patch",
        "rayservice",
        SERVICE,
        "--subresource=status",
        "--type=merge",
        "--patch",
        json.dumps({"status": status}),
    )
    return name


async def made(api: Objects) -> str:
    """The Ray cluster that the RayService has got."""
    async with asyncio.timeout(30):
        while True:
            name = service_of(await api.get(f"{RAY_SERVICES}/{SERVICE}")).pending
            if name is not None:
                with suppress(NotFoundException):
                    await api.get(f"{RAY_CLUSTERS}/{name}")
                    return name
            await asyncio.sleep(0.2)
