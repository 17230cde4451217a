"""What the chart's pods may do, and where its secrets are."""

import base64
import re

import pytest

from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import PRESETS, Object, Pod, containers, every_case, find, objects, pods, template

ALL = every_case()
SECRET_NAMES = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|REDIS_URL|AUTH$")
UNWRITABLE = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
"""Kinds of volumes that Pod Security restricted allows, of those we use."""


def restricted_mistakes(pod: Pod) -> list[str]:
    """What Pod Security's `restricted` would refuse, and what we ask for beyond it."""
    found = []
    spec, security = pod.spec, pod.spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        found += [key] if spec.get(key) else []
    found += [] if security.get("runAsNonRoot") and security.get("runAsUser", 0) > 0 else ["runs as root"]
    found += [] if security.get("seccompProfile") == {"type": "RuntimeDefault"} else ["no seccomp profile"]
    found += [f"volume {kind}" for volume in spec.get("volumes", []) for kind in volume.keys() - {"name"} - UNWRITABLE]
    for container in containers(pod):
        own, name = container.get("securityContext", {}), container["name"]
        found += [] if own.get("allowPrivilegeEscalation") is False else [f"{name} may escalate"]
        found += [] if own.get("capabilities") == {"drop": ["ALL"]} else [f"{name} has capabilities"]
        found += [] if own.get("readOnlyRootFilesystem") else [f"{name} has a writable root"]
        found += [f"{name} has a host port" for port in container.get("ports", []) if port.get("hostPort")]
        found += (
            []
            if container.get("resources", {}).get("requests") and container["resources"].get("limits", {}).get("memory")
            else [f"{name} is unbounded"]
        )
    return found


@pytest.mark.parametrize(("preset", "values"), ALL)
def test_every_pod_keeps_to_restricted_pod_security(preset: str, values: str) -> None:
    found = list(pods(objects(preset, values)))

    assert len(found) >= 3
    assert {pod.owner: wrong for pod in found if (wrong := restricted_mistakes(pod))} == {}


def test_the_check_sees_a_pod_that_is_not() -> None:
    pod = next(pods(objects()))
    del pod.spec["securityContext"]["runAsNonRoot"]
    pod.spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    pod.spec["containers"][0]["securityContext"]["capabilities"] = {}

    assert restricted_mistakes(pod) == [
        "runs as root",
        "volume hostPath",
        f"{pod.spec['containers'][0]['name']} has capabilities",
    ]


@pytest.mark.parametrize(("preset", "values"), ALL)
def test_what_is_written_lies_on_a_volume_of_bounded_size(preset: str, values: str) -> None:
    for pod in pods(objects(preset, values)):
        mounts = {mount["mountPath"] for container in pod.spec["containers"] for mount in container["volumeMounts"]}
        folders = [volume["emptyDir"] for volume in pod.spec["volumes"] if "emptyDir" in volume]
        assert "/tmp" in mounts or "redis" in pod.owner, pod.owner
        assert all(folder.get("sizeLimit") for folder in folders), pod.owner


@pytest.mark.parametrize(("preset", "values"), ALL)
def test_only_the_autoscaler_has_a_token_of_kubernetes(preset: str, values: str) -> None:
    with_token = [
        pod.owner for pod in pods(objects(preset, values)) if pod.spec.get("automountServiceAccountToken") is not False
    ]

    assert set(with_token) <= {
        "Deployment rel-penstock-autoscaler",
        "Deployment gate-autoscaler",
        "Deployment rel-gate-autoscaler",
    }


def test_the_autoscaler_may_do_exactly_this() -> None:
    assert find(objects(), "Role")["rules"] == [
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayservices"],
            "resourceNames": ["rel-penstock"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "verbs": ["list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["rel-penstock-autoscaler"],
            "verbs": ["get", "update"],
        },
    ]
    assert [subject["name"] for subject in find(objects(), "RoleBinding")["subjects"]] == ["rel-penstock-autoscaler"]


def test_the_lease_says_nothing_that_its_holder_writes() -> None:
    """An upgrade, which merges what the chart says, would otherwise take it away from the leader."""
    deployment = find(objects(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    lease = find(objects(), "Lease")

    assert lease.keys() == {"apiVersion", "kind", "metadata"}
    assert f"--lease={lease['metadata']['name']}" in deployment["args"]
    assert "annotations" not in lease["metadata"], "no resource policy: an uninstall takes it away"
    assert not [each for each in objects("", BRANCHES["no autoscaler"]) if each["kind"] == "Lease"]


def secret_values(found: list[Object]) -> list[str]:
    return [
        base64.b64decode(value).decode()
        for each in found
        if each["kind"] == "Secret"
        for key, value in each["data"].items()
        if key != "tenants.yaml"
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_secrets_stand_in_secrets_only(preset: str) -> None:
    found = objects(preset)
    secrets = secret_values(found)
    elsewhere = str([each for each in found if each["kind"] != "Secret"])

    assert len(secrets) >= 4
    assert all(len(secret) >= 32 for secret in secrets)
    assert not [secret for secret in secrets if secret in elsewhere]


@pytest.mark.parametrize(("preset", "values"), ALL)
def test_secrets_reach_processes_by_reference(preset: str, values: str) -> None:
    for pod in pods(objects(preset, values)):
        for container in containers(pod):
            for variable in container.get("env", []):
                if SECRET_NAMES.search(variable["name"]):
                    assert variable.get("valueFrom", {}).keys() == {"secretKeyRef"}, (pod.owner, variable)
            assert not re.search(r"\$\(|sk-penstock", str([container.get("command"), container.get("args")]))


def test_ray_takes_orders_with_a_token_only() -> None:
    cluster = find(objects(), "RayService")["spec"]["rayClusterConfig"]

    assert cluster["authOptions"] == {"mode": "token", "secretName": "rel-penstock-ray"}
    assert "value" not in cluster["gcsFaultToleranceOptions"]["redisPassword"]


def test_first_tenants_have_keys_of_the_usual_form() -> None:
    secret = find(
        objects("", "{tenants: {first: [{name: acme, max_parallel: 4}, {name: b.c}]}}"),
        "Secret",
        "rel-penstock-tenants",
    )
    keys = {name: base64.b64decode(secret["data"][name]).decode() for name in ("acme", "b.c")}

    assert all(re.fullmatch(r"sk-penstock-[0-9a-f]{48}", key) for key in keys.values())
    assert keys["acme"] != keys["b.c"]
    assert all(key in base64.b64decode(secret["data"]["tenants.yaml"]).decode() for key in keys.values())


def test_the_cluster_secret_is_one_that_the_platform_takes() -> None:
    secret = base64.b64decode(find(objects(), "Secret", "rel-penstock-cluster")["data"]["cluster-secret"]).decode()

    assert len(bytes.fromhex(secret)) == 32


def test_replicas_read_adapters_and_gateways_write_them() -> None:
    found = {pod.labels.get("ray.io/group", ""): pod for pod in pods(objects("values-production.yaml"))}

    for group, is_read_only in (("gateway", None), ("pool-edge", True), ("pool-cloud", True)):
        volume = next(each for each in found[group].spec["volumes"] if each["name"] == "adapters")
        mounts = found[group].spec["containers"][0]["volumeMounts"]
        mount = next(each for each in mounts if each["name"] == "adapters")
        assert volume["persistentVolumeClaim"].get("readOnly") is is_read_only
        assert mount.get("readOnly") is is_read_only


def test_rays_state_has_a_redis_and_a_password_of_its_own_in_production() -> None:
    found = objects("values-production.yaml")
    options = find(found, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]

    assert options["redisAddress"] == "redis://rel-penstock-ray-redis.llm.svc:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "rel-penstock-ray-redis"
    passwords = {find(found, "Secret", f"rel-penstock-{name}")["data"]["password"] for name in ("redis", "ray-redis")}
    assert len(passwords) == 2


def test_backups_are_written_by_a_pod_that_reaches_redis_only_onto_a_claim_that_stays() -> None:
    found = objects("", BRANCHES["backups on a claim that is made"])
    job = next(pod for pod in pods(found) if pod.owner == "CronJob rel-penstock-backups")
    claim = find(found, "PersistentVolumeClaim")
    policy = find(found, "NetworkPolicy", "rel-penstock-tenants")

    assert job.spec["containers"][0]["command"] == [
        *("penstock", "tenant", "export", "--folder", "/backups", "--keep", "14"),
    ]
    assert job.spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= job.labels.items()
    assert not [each for each in objects() if each["kind"] == "CronJob"], "off unless asked for"


def test_budgets_leave_a_node_free_to_drain() -> None:
    production = {
        each["metadata"]["name"]: each["spec"]
        for each in objects("values-production.yaml")
        if each["kind"] == "PodDisruptionBudget"
    }
    single = [each for each in objects("", BRANCHES["one of each"]) if each["kind"] == "PodDisruptionBudget"]

    assert {name.removeprefix("rel-penstock-"): spec.get("minAvailable") for name, spec in production.items()} == {
        "gateway": 2,
        "pool-edge": 1,
        "pool-cloud": 3,
        "autoscaler": None,
    }
    assert single == []


def test_without_a_cluster_to_keep_them_in_secrets_are_not_made() -> None:
    refused = template("", "{rayRedis: {enabled: true}}", is_kept=True)
    own = "{secrets: {cluster: a, redis: b, ray: c, tenants: d}, test: {tenant: acme}}"

    assert refused.returncode != 0
    for name in ("secrets.cluster", "secrets.ray", "secrets.redis", "secrets.rayRedis", "secrets.tenants"):
        assert name in refused.stderr
    assert "secrets.makeWithoutCluster=true" in refused.stderr
    assert template("", own, is_kept=True).returncode == 0
    assert "secrets.redis," not in template("", "{secrets: {redis: b}}", is_kept=True).stderr
