"""What a token of the autoscaler's ServiceAccount may do, as the chart gives it: every verb on every resource that the
API server knows, in its own namespace, in another one and in all, by real requests. Writes are dry runs of objects that
are not there: were one allowed, nothing would happen.
"""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from penstock.autoscale.kubernetes.client import open_client
from penstock.autoscale.kubernetes.elector import Elector, end
from penstock.autoscale.kubernetes.lease import Times
from penstock.autoscale.kubernetes.mirror import Mirror, list_pods, list_ray
from penstock.autoscale.kubernetes.resources import (
    WORKERS,
    Document,
    Pod,
    RayCluster,
    Service,
    cluster_of,
    pod_of,
    service_of,
)
from penstock.autoscale.kubernetes.workers import Workers
from penstock.wire.serve_agent import AppPlaces
from tests.cluster import Cluster, running_cluster
from tests.e2e.ray_objects import APP, RBAC, account_of, ray_cluster_spec
from tests.e2e.rig import until
from tests.unit.deploy.charts import NAMESPACE, RELEASE, find, objects

pytestmark = [pytest.mark.platform, pytest.mark.timeout(240)]

FULLNAME = f"{RELEASE}-penstock"
LEASE = f"{FULLNAME}-autoscaler"
OTHER = "elsewhere"
ABSENT = "absent"
EVERYWHERE = "*"
"""A scope: all namespaces, or none."""
PARALLEL = 12
CONTENT = {"create": "application/json", "update": "application/json", "patch": "application/merge-patch+json"}
METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}
"""HTTP method of each of Kubernetes' verbs."""
ON_ONE = ("get", "update", "patch", "delete")

Record = Callable[[str, object], None]


class Resource(NamedTuple):
    version: str
    """Group and version as in a path: `api/v1`, `apis/ray.io/v1`."""
    name: str
    """pods, or pods/exec."""
    is_namespaced: bool

    def path(self, verb: str, scope: str, named: str) -> str:
        """A subresource is always one object's."""
        kind, *below = self.name.split("/")
        place = self.version if scope == EVERYWHERE else f"{self.version}/namespaces/{scope}"
        return "/".join(["", place, kind, *([named] if verb in ON_ONE or below else []), *below])

    @property
    def scopes(self) -> list[str]:
        return [NAMESPACE, OTHER, EVERYWHERE] if self.is_namespaced else [EVERYWHERE]


class Right(NamedTuple):
    verb: str
    resource: str
    scope: str = NAMESPACE


EVERYONE = {Right("create", f"selfsubject{what}reviews", EVERYWHERE) for what in ("access", "rules", "")}
"""Everybody who is known may ask who he is, and what he may do."""
UNNAMED = {
    Right("list", "rayclusters"),
    Right("watch", "rayclusters"),
    Right("patch", "rayclusters"),
    Right("list", "pods"),
    Right("watch", "pods"),
    Right("create", "events"),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster("--kuberay", must=True) as running:
        for namespace in (NAMESPACE, OTHER):
            running.kubectl("create", "namespace", namespace)
        running.kubectl("create", "serviceaccount", "nobody", f"--namespace={NAMESPACE}")
        mine = [each for each in objects() if each["kind"] in ("ServiceAccount", "Role", "RoleBinding", "Lease")]
        running.apply(*[each | {"metadata": each["metadata"] | {"namespace": NAMESPACE}} for each in mine])
        yield running


class Caller:
    """One token."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self._account = account_of(
            cluster, folder / name, cluster.kubectl("create", "token", name, f"--namespace={NAMESPACE}").strip()
        )
        self._turns = asyncio.Semaphore(PARALLEL)

    async def __aenter__(self) -> "Caller":
        token = (self._account.folder / "token").read_text()
        verify = ssl.create_default_context(cafile=str(self._account.folder / "ca.crt"))
        self._http = httpx.AsyncClient(
            base_url=self._account.server,
            verify=verify,
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
            timeout=30,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def json(self, path: str) -> Any:
        return (await self._http.get(path)).raise_for_status().json()

    async def status(
        self, method: str, path: str, verb: str = "", headers: dict[str, str] | None = None, **query: str
    ) -> int:
        """Status of the answer, of which only the beginning is read."""
        query |= {"dryRun": "All"} if method != "GET" else {}
        query |= {"watch": "1", "timeoutSeconds": "1"} if verb == "watch" else {}
        content = (
            {"content": b"{}", "headers": {"content-type": CONTENT[verb]} | (headers or {})}
            if verb in CONTENT
            else {"headers": headers or {}}
        )
        async with self._turns:
            while True:
                async with self._http.stream(method, path, params=query, **content) as answer:
                    if answer.status_code != 429:
                        return answer.status_code

    async def resources(self) -> list[Resource]:
        """All that the API server knows, as it says itself: subresources too."""
        groups = [
            "api/v1",
            *[
                f"apis/{version['groupVersion']}"
                for group in (await self.json("/apis"))["groups"]
                for version in group["versions"]
            ],
        ]
        lists = await asyncio.gather(*[self.json(f"/{group}") for group in groups])
        return [
            Resource(group, each["name"], each["namespaced"])
            for group, found in zip(groups, lists, strict=True)
            for each in found["resources"]
        ]

    async def allowed(self, resources: list[Resource], named: str = ABSENT) -> tuple[set[Right], int]:
        """Rights among every verb on every resource in every scope, and the number that was tried."""
        tries = [
            (verb, each, scope)
            for each in resources
            for scope in each.scopes
            for verb in METHODS
            if scope != EVERYWHERE
            or not each.is_namespaced
            or (verb not in ON_ONE and "/" not in each.name)  # else there is no such path
        ]
        answers = await asyncio.gather(
            *[self.status(METHODS[verb], each.path(verb, scope, named), verb) for verb, each, scope in tries]
        )
        found = {
            Right(verb, each.name, scope)
            for (verb, each, scope), answer in zip(tries, answers, strict=True)
            if answer != 403
        }
        return found, len(tries)


async def test_what_the_role_says_is_allowed_and_everything_else_is_refused(
    cluster: Cluster, tmp_path: Path, record_property: Record
) -> None:
    async with Caller(cluster, tmp_path, LEASE) as autoscaler, Caller(cluster, tmp_path, "nobody") as nobody:
        began_s = time.monotonic()
        resources = await autoscaler.resources()
        assert {
            "pods/exec",
            "pods/eviction",
            "secrets",
            "serviceaccounts/token",
            "rolebindings",
            "rayservices/status",
        } <= {each.name for each in resources}

        found, num_tried = await autoscaler.allowed(resources)
        assert found == EVERYONE | UNNAMED
        assert (await nobody.allowed([each for each in resources if each.name.startswith("selfsubject")]))[
            0
        ] == EVERYONE

        ours = [
            each for each in resources if each.name.split("/")[0] in ("rayservices", "rayclusters", "leases", "pods")
        ]
        of_service, num_service = await autoscaler.allowed(ours, FULLNAME)
        of_lease, num_lease = await autoscaler.allowed(ours, LEASE)
        assert of_service == UNNAMED
        assert of_lease - UNNAMED == {Right("get", "leases"), Right("update", "leases")}
        took_s = time.monotonic() - began_s
        figures = {
            "requests": num_tried + num_service + num_lease,
            "resources": len(resources),
            "took_s": round(took_s, 1),
        }
        record_property("rights_tried", figures)
        assert took_s < 150


async def test_the_way_to_try_sees_a_right_that_is_there(cluster: Cluster, tmp_path: Path) -> None:
    given = {"secrets", "pods/exec", "rayservices/status"}
    cluster.kubectl(
        "create", "role", "all", f"--namespace={OTHER}", "--verb=*", *[f"--resource={kind}" for kind in given]
    )
    cluster.kubectl(
        "create", "rolebinding", "all", f"--namespace={OTHER}", "--role=all", f"--serviceaccount={NAMESPACE}:nobody"
    )
    async with Caller(cluster, tmp_path, "nobody") as nobody:
        tried = [each for each in await nobody.resources() if each.name in given | {"configmaps", "pods"}]

        assert (await nobody.allowed(tried))[0] == {Right(verb, kind, OTHER) for verb in METHODS for kind in given}


async def test_a_list_or_a_watch_of_rayservices_is_of_the_one_that_is_its_own(cluster: Cluster, tmp_path: Path) -> None:
    async with Caller(cluster, tmp_path, LEASE) as autoscaler:
        path = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayservices"
        for verb in ("list", "watch"):
            own, other = f"metadata.name={FULLNAME}", f"metadata.name={ABSENT}"
            assert await autoscaler.status("GET", path, verb, fieldSelector=own) == 200
            assert await autoscaler.status("GET", path, verb, fieldSelector=other) == 403
            assert await autoscaler.status("GET", path.replace(NAMESPACE, OTHER), verb, fieldSelector=own) == 403


async def test_it_can_be_nobody_else_and_sees_nothing_of_the_servers_inside(cluster: Cluster, tmp_path: Path) -> None:
    async with Caller(cluster, tmp_path, LEASE) as autoscaler:
        for headers in (
            {"impersonate-user": "admin"},
            {"impersonate-user": "x", "impersonate-group": "system:masters"},
        ):
            assert await autoscaler.status("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", headers=headers) == 403
        for path in ("/metrics", "/logs/", "/debug/pprof/", "/configz", "/flagz", "/api/v1/nodes/x/proxy/"):
            assert await autoscaler.status("GET", path) == 403, path


async def test_with_these_rights_it_leads_and_scales(cluster: Cluster, tmp_path: Path) -> None:
    """The autoscaler's own calls, all of them, on objects that are there."""
    calls: Counter[tuple[str, ...]] = Counter()
    token = cluster.kubectl("create", "token", LEASE, f"--namespace={NAMESPACE}").strip()
    document: Document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "c", "namespace": NAMESPACE},
        "spec": ray_cluster_spec(1),
    }
    cluster.apply(document)
    account = account_of(cluster, tmp_path / "account", token)
    async with open_client(account, lambda *call: calls.update([call])) as client:
        named = list_ray(client, NAMESPACE, "rayservices", field_selector=f"metadata.name={FULLNAME}")
        services: Mirror[Service] = Mirror("rayservices", named, service_of, Random(1))
        clusters: Mirror[RayCluster] = Mirror(
            "rayclusters", list_ray(client, NAMESPACE, "rayclusters"), cluster_of, Random(2)
        )
        pods: Mirror[Pod] = Mirror("pods", list_pods(client, NAMESPACE, WORKERS), pod_of, Random(3))
        elector = Elector(client, NAMESPACE, LEASE, "me", Times(retry_s=0.2))
        tasks = [asyncio.create_task(part) for part in (services.run(), clusters.run(), pods.run(), elector.run())]
        try:
            await until(
                lambda: services.is_current and clusters.is_current and pods.is_current and elector.is_leader(), 30
            )
            await until(lambda: calls["update", "leases", "200"] >= 2, 30)
            assert await Workers(client, NAMESPACE, clusters, pods, elector.is_leader).follow(
                "c", [AppPlaces(APP, 3, [])]
            )
            await until(lambda: clusters.objects["c"].groups[0].replicas == 3, 30)
        finally:
            await end(tasks)
        assert {key[2] for key in calls} == {"200"}, calls


def test_the_role_of_the_other_tests_is_the_charts() -> None:
    def rights(rules: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
        each = [
            (group, kind, verb, "resourceNames" in rule)
            for rule in rules
            for group in rule["apiGroups"]
            for kind in rule["resources"]
            for verb in rule["verbs"]
        ]
        return sorted(each)

    (rig,) = [found for found in yaml.safe_load_all(RBAC) if found["kind"] == "Role"]
    assert rights(rig["rules"]) == rights(find(objects(), "Role")["rules"])
