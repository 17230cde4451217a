"""What the chart's pods may do, and where its secrets are."""

import base64
import re

import msgspec
import pytest
import yaml
from cryptography import x509

from penstock.base.environment import CLUSTER_SECRET, REPLICA_SECRETS
from penstock.cli.first_tenants import FirstTenants
from penstock.tenancy.tenants import Limits
from penstock.wire.stream_config import GATEWAY_NAME, REPLICA_NAME
from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import PRESETS, Object, Pod, containers, every_case, find, objects, pods, template

ALL = every_case()
SECRET_NAMES = re.compile(r"KEY|TOKEN|PASSWORD|SECRET(?!S$)|REDIS_URL|AUTH$")
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


def serving_env(component: str, values: str = "") -> dict[str, Object]:
    """Environment of the containers that serve in a component's pods, by name of the variable."""
    return {
        variable["name"]: variable
        for pod in pods(objects("", values))
        if pod.labels["app.kubernetes.io/component"] == component
        for variable in pod.spec["containers"][0]["env"]
    }


def test_a_replica_has_its_own_secrets_and_not_the_clusters() -> None:
    assert CLUSTER_SECRET in serving_env("gateway")
    assert CLUSTER_SECRET not in serving_env("pool")
    assert REPLICA_SECRETS in serving_env("pool")


def test_a_replica_has_the_clusters_secret_while_gateways_of_the_version_before_are_let_in() -> None:
    assert CLUSTER_SECRET in serving_env("pool", "stream: {accept_previous_hello: true}")


def test_a_replicas_secrets_are_derived_before_it_starts_into_memory_that_it_can_only_read() -> None:
    for pod in pods(objects()):
        if pod.labels["app.kubernetes.io/component"] != "pool":
            continue
        [made] = pod.spec["initContainers"]
        [serving] = pod.spec["containers"]
        path = next(variable["value"] for variable in serving["env"] if variable["name"] == REPLICA_SECRETS)
        mounts = {each["name"]: each for each in serving["volumeMounts"]}
        volumes = {each["name"]: each for each in pod.spec["volumes"]}

        assert made["command"] == ["penstock", "replica-secrets", path]
        assert {variable["name"] for variable in made["env"]} == {CLUSTER_SECRET}
        assert path.startswith(mounts["secrets"]["mountPath"] + "/")
        assert mounts["secrets"]["readOnly"] is True
        assert volumes["secrets"]["emptyDir"]["medium"] == "Memory"


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
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
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


def test_new_tenants_get_the_limits_that_the_values_name() -> None:
    values = "{tenants: {first: [], defaults: {tokens_per_minute: 2000000, max_parallel: 0}}}"
    secret = find(objects("", values), "Secret", "rel-penstock-tenants")
    file = yaml.safe_load(base64.b64decode(secret["data"]["tenants.yaml"]))
    wanted = msgspec.convert(file, FirstTenants)

    assert wanted.tenants == ()
    assert wanted.defaults is not None
    assert wanted.defaults.limits == Limits(tokens_per_minute=2_000_000)


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


def test_gateways_alone_see_where_adapters_are_taken_from_and_can_not_write_there() -> None:
    found = list(pods(objects("", BRANCHES["adapters from a claim, and places with CAs of one's own"])))
    holders = {pod.labels.get("ray.io/group", "") for pod in found if "adapter-import" in str(pod.spec)}
    gateway = next(pod for pod in found if pod.labels.get("ray.io/group") == "gateway")
    mounts = {each["name"]: each for each in gateway.spec["containers"][0]["volumeMounts"]}
    volumes = {each["name"]: each for each in gateway.spec["volumes"]}

    assert holders == {"gateway"}
    assert mounts["adapter-import"] == {
        "name": "adapter-import",
        "mountPath": "/var/lib/penstock/import",
        "readOnly": True,
    }
    assert volumes["adapter-import"]["persistentVolumeClaim"] == {"claimName": "imports", "readOnly": True}
    assert mounts["adapter-ca"]["readOnly"]
    assert volumes["adapter-ca"]["secret"] == {"secretName": "cas", "items": [{"key": "ca.crt", "path": "ca.crt"}]}


def test_the_gateway_is_told_of_the_import_folder_and_the_cas_beside_its_own_settings() -> None:
    found = objects("", BRANCHES["adapters from a claim, and places with CAs of one's own"])
    (service,) = [each for each in found if each["kind"] == "RayService"]
    applications = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (gateway,) = [each for each in applications if each["name"] == "gateway"]

    assert gateway["args"]["config"]["adapters"] == {
        "folder": "/var/lib/penstock/adapters",
        "import_folder": "/var/lib/penstock/import",
        "max_per_tenant": 32,
        "sources": {
            "https": "listed",
            "hosts": ["files.inner.svc"],
            "ca_file": "/etc/penstock/tls/adapters/ca.crt",
        },
    }


def test_only_gateways_have_the_texts_of_batches() -> None:
    found = pods(objects("", "batches: {enabled: true}"))
    holders = {pod.labels.get("ray.io/group", "") for pod in found if "batches" in str(pod.spec.get("volumes"))}

    assert holders == {"gateway"}
    assert find(objects("", "batches: {enabled: true}"), "PersistentVolumeClaim", "rel-penstock-batches")


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


# TLS

BOTH = "tls: {stream: true, gateway: true}"


def certificate_of(found: list[Object], name: str) -> x509.Certificate:
    data = find(found, "Secret", f"rel-penstock-tls-{name}")["data"]
    return x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))


def ca_of(found: list[Object], name: str) -> bytes:
    return base64.b64decode(find(found, "Secret", f"rel-penstock-tls-{name}")["data"]["ca.crt"])


def test_helms_certificates_have_the_names_that_both_sides_ask_for() -> None:
    found = objects("", BOTH)
    names = {
        name: certificate_of(found, name)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.DNSName)
        for name in ("gateway", "replica", "http")
    }

    assert names["gateway"] == [GATEWAY_NAME]
    assert names["replica"] == [REPLICA_NAME]
    assert "rel-penstock.llm.svc" in names["http"]
    assert ca_of(found, "gateway") == ca_of(found, "replica") != ca_of(found, "http")
    for name in ("gateway", "replica"):
        ca = x509.load_pem_x509_certificate(ca_of(found, name))
        certificate_of(found, name).verify_directly_issued_by(ca)


def test_cert_manager_is_asked_for_the_same_names() -> None:
    found = objects("", BRANCHES["tls of cert-manager's"])
    asked = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in found if each["kind"] == "Certificate"}

    assert asked["rel-penstock-tls-gateway"] == [GATEWAY_NAME]
    assert asked["rel-penstock-tls-replica"] == [REPLICA_NAME]
    assert "rel-penstock.llm.svc" in asked["rel-penstock-tls-http"]
    assert not [each for each in found if each["kind"] == "Secret" and "-tls-" in each["metadata"]["name"]]


@pytest.mark.parametrize("branch", ["tls of Helm's", "tls of cert-manager's"])
def test_every_file_that_the_configuration_names_lies_in_the_pod(branch: str) -> None:
    found = objects("", BRANCHES[branch])
    applications = yaml.safe_load(find(found, "RayService")["spec"]["serveConfigV2"])["applications"]
    arguments = {each["name"]: each["args"] for each in applications}
    gateway, pool = arguments["gateway"]["config"], arguments["pool-demo"]
    wanted = {
        "gateway": [*gateway["stream"]["tls"].values(), *gateway["gateway"]["tls"].values()],
        "pool": [*pool["stream"]["tls"].values()],
    }
    for pod in pods(found):
        component = pod.labels["app.kubernetes.io/component"]
        folders = {each["mountPath"]: each["name"] for each in pod.spec["containers"][0]["volumeMounts"]}
        for path in wanted.get(component, []):
            folder, _, name = path.rpartition("/")
            volume = next(each for each in pod.spec["volumes"] if each["name"] == folders[folder])

            assert name in ("tls.crt", "tls.key", "ca.crt")
            assert volume["secret"]["defaultMode"] == 0o440
    assert len(wanted["gateway"]) == 5


def test_a_pool_has_no_gateways_certificate() -> None:
    for pod in pods(objects("", BOTH)):
        if pod.labels["app.kubernetes.io/component"] == "pool":
            named = {each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each}

            assert named == {"rel-penstock-tls-replica"}


def test_by_https_everything_in_the_chart_asks_by_it() -> None:
    found = objects("", BRANCHES["tls of Helm's"])
    gateway = next(pod for pod in pods(found) if pod.labels["app.kubernetes.io/component"] == "gateway")

    assert gateway.spec["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert find(found, "Service", "rel-penstock")["spec"]["ports"][0]["appProtocol"] == "https"
    annotations = find(found, "Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"


def test_an_issuer_without_cert_manager_is_a_sentence() -> None:
    done = template("", "tls: {stream: true, issuer: {name: ca}}", ("ray.io/v1/RayService",))

    assert done.returncode != 0
    assert "no cert-manager" in done.stderr


def test_without_a_cluster_to_keep_them_in_secrets_are_not_made() -> None:
    refused = template("", "{rayRedis: {enabled: true}}", is_kept=True)
    own = "{secrets: {cluster: a, redis: b, ray: c, tenants: d}, test: {tenant: acme}}"

    assert refused.returncode != 0
    for name in ("secrets.cluster", "secrets.ray", "secrets.redis", "secrets.rayRedis", "secrets.tenants"):
        assert name in refused.stderr
    assert "secrets.makeWithoutCluster=true" in refused.stderr
    assert template("", own, is_kept=True).returncode == 0
    assert "secrets.redis," not in template("", "{secrets: {redis: b}}", is_kept=True).stderr


@pytest.mark.parametrize("part", ["stream", "gateway"])
def test_without_a_cluster_to_keep_them_in_certificates_are_not_made(part: str) -> None:
    """Each rendering would have a CA of its own: pods of yesterday's would be refused by today's."""
    own = "secrets: {cluster: a, redis: b, ray: c, tenants: d}, test: {tenant: acme}"
    refused = template("", f"{{{own}, tls: {{{part}: true}}}}", is_kept=True)

    assert refused.returncode != 0
    assert "tls.issuer.name" in refused.stderr
    assert template("", f"{{{own}, tls: {{{part}: true, issuer: {{name: ca}}}}}}", is_kept=True).returncode == 0
