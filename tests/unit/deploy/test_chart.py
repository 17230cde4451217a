"""The chart renders, in every preset and branch, what Kubernetes and KubeRay accept."""

import json
import re
import subprocess

import pytest
import yaml

from deploy import chart_defaults, chart_schema, chart_values
from penstock.base.config import convert
from penstock.base.environment import REDIS_URL, serve_environment
from penstock.base.pod import DRAIN_S, POD_DIR
from penstock.cli.serve_apps import GatewayArguments, PoolArguments, ServeAgentArguments
from penstock.wire.discovery import GATEWAY_APP, pool_app_name
from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import (
    CHART,
    HELM,
    IMAGE,
    NAMESPACE,
    PRESETS,
    ROOT,
    Object,
    digest,
    every_case,
    find,
    objects,
    pods,
    template,
)
from tests.unit.deploy.schemas import HTTPROUTE, OURS, VERSIONS, mistakes, ray_mistakes

ALL = every_case()


def every_object() -> dict[str, Object]:
    """Objects of all presets and branches, each different one once."""
    return {digest(each): each for preset, values in (case.values for case in ALL) for each in objects(preset, values)}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_knows(version: str) -> None:
    found = {
        f"{each['kind']} {each['metadata']['name']}": wrong
        for each in every_object().values()
        if each["kind"] not in OURS and (wrong := mistakes(each, version))
    }

    assert found == {}


def test_every_rayservice_is_one_that_kuberay_knows() -> None:
    services = [each for each in every_object().values() if each["kind"] == "RayService"]

    assert len(services) > len(PRESETS)
    assert [ray_mistakes(each) for each in services if ray_mistakes(each)] == []


def test_every_httproute_is_one_that_gateway_api_knows() -> None:
    routes = [each for each in every_object().values() if each["kind"] == "HTTPRoute"]

    assert len(routes) >= 2
    assert [error.message for each in routes for error in HTTPROUTE.iter_errors(each)] == []
    routes[0]["spec"]["rules"][0]["timeouts"]["backend"] = "1s"
    assert not HTTPROUTE.is_valid(routes[0]), "a field that it does not know"


def test_kubernetes_schemas_refuse_an_unknown_field() -> None:
    deployment = find(objects(), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"

    assert all(mistakes(deployment, version) for version in VERSIONS)


def test_kuberays_schema_refuses_an_unknown_field() -> None:
    service = find(objects(), "RayService")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volume"] = []

    assert ray_mistakes(service)


def test_kuberays_schema_refuses_a_port_or_a_variable_that_stands_there_twice() -> None:
    for values in ("", BRANCHES["providers"]):
        service = find(objects("", values), "RayService")
        container = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
        assert ray_mistakes(service) == []
        container["ports"].append({"name": "again", "containerPort": 8080})
        container["env"].append({"name": "HF_HOME", "value": "again"})
        assert len(ray_mistakes(service)) == 2


def test_providers_that_share_a_key_share_its_variable() -> None:
    gateway = next(
        pod
        for pod in pods(objects("", BRANCHES["providers"]))
        if pod.labels["app.kubernetes.io/component"] == "gateway"
    )

    assert [each["name"] for each in gateway.spec["containers"][0]["env"]].count("UP_KEY") == 1


def test_a_worker_group_names_everything_that_the_operator_asks_for() -> None:
    for group in find(objects("values-demo.yaml"), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert (group["minReplicas"], group["maxReplicas"]) == (0, 1000), "counts are the autoscaler's affair"
        resources = json.loads(group["rayStartParams"]["resources"].strip("'"))
        assert resources == (
            {"gateway": 1, "serve_agent": 1} if group["groupName"] == "gateway" else {group["groupName"]: 1}
        )


@pytest.mark.parametrize("preset", PRESETS)
def test_helm_lint_finds_nothing(preset: str) -> None:
    files = ["-f", str(CHART / preset)] if preset else []
    done = subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART), *files], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stdout


def test_every_template_is_reached() -> None:
    texts = [template(*case.values).stdout for case in ALL]
    rendered = {name for text in texts for name in re.findall(r"# Source: penstock/templates/(?:tests/)?(\S+)", text)}

    assert rendered == {path.name for path in (CHART / "templates").rglob("*.yaml")}


@pytest.mark.parametrize(("preset", "values"), ALL)
def test_serve_is_told_what_the_platform_can_read(preset: str, values: str) -> None:
    service = find(objects(preset, values), "RayService")
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    apps = {app["name"]: app for app in serve["applications"]}
    config = convert(apps[GATEWAY_APP]["args"], GatewayArguments, name="args").config
    convert(apps["serve-agent"]["args"], ServeAgentArguments, name="args")

    assert serve["proxy_location"] == "Disabled"
    assert set(apps) == {GATEWAY_APP, "serve-agent", *(pool_app_name(pool.name) for pool in config.pools)}
    assert config.redis.url is None, "it has a password"
    assert config.gateway.host == "0.0.0.0"
    for pool in config.pools:
        app = apps[pool_app_name(pool.name)]
        assert app["external_scaler_enabled"]
        assert convert(app["args"], PoolArguments, name="args").pool == pool
        assert app["args"]["pool"] in apps[GATEWAY_APP]["args"]["config"]["pools"]
    assert all(app["route_prefix"] is None for app in apps.values())


def test_the_autoscaler_reads_what_the_gateways_read() -> None:
    found = objects("values-production.yaml")
    serve = yaml.safe_load(find(found, "RayService")["spec"]["serveConfigV2"])
    autoscaler = yaml.safe_load(find(found, "ConfigMap", "rel-penstock-autoscaler")["data"]["penstock.yaml"])

    assert serve["applications"][0]["args"]["config"] == autoscaler


def test_whole_numbers_stay_whole() -> None:
    text = template("values-production.yaml").stdout

    assert not re.search(r"\d[eE]\+\d", text), "Helm writes large numbers as floats where a template lets it"


def test_a_missing_image_is_a_sentence() -> None:
    done = template(image="")

    assert done.returncode != 0
    assert "image.repository is not set: build an image with `make image`" in done.stderr


def test_a_cluster_without_kuberay_is_a_sentence() -> None:
    done = template(apis=())

    assert done.returncode != 0
    assert "this cluster has no ray.io/v1 RayService: install KubeRay" in done.stderr


def test_a_name_that_kuberay_refuses_is_a_sentence() -> None:
    for release in ("1st", 41 * "a" + "-penstock"):
        done = template(release=release)
        assert done.returncode != 0
        assert "set fullnameOverride" in done.stderr


def test_a_gateway_api_that_is_not_there_is_a_sentence() -> None:
    done = template("", "{httpRoute: {enabled: true, parentRefs: [{name: a}]}}", apis=("ray.io/v1/RayService",))

    assert done.returncode != 0
    assert "no Gateway API" in done.stderr


def test_kuberay_finds_the_ports_that_it_makes_services_of() -> None:
    ports = find(objects(), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ][0]["ports"]

    assert {"gcs-server": 6379, "dashboard": 8265, "serve": 9}.items() <= {
        port["name"]: port["containerPort"] for port in ports
    }.items()


def test_rays_processes_find_what_serve_must_find_before_it_is_imported() -> None:
    for pod in pods(objects()):
        env = {variable["name"]: variable.get("value") for variable in pod.spec["containers"][0].get("env", [])}
        if "ray.io/group" in pod.labels:
            assert serve_environment().items() <= env.items()
            assert {REDIS_URL} <= env.keys()
        if pod.labels["app.kubernetes.io/component"] in ("gateway", "pool"):
            assert {REDIS_URL, POD_DIR, DRAIN_S} <= env.keys()


@pytest.mark.parametrize("longest_s", [600, 90])
def test_ways_in_wait_longer_than_the_longest_request(longest_s: int) -> None:
    config = f"gateway: {{config: {{request_timeout_s: {longest_s}}}}}\n"
    found = objects("", config + BRANCHES["ingress and route"])
    annotations = find(found, "Ingress")["metadata"]["annotations"]
    timeouts = find(found, "HTTPRoute")["spec"]["rules"][0]["timeouts"]

    assert {name.rpartition("/")[2]: value for name, value in annotations.items()} == {
        "proxy-buffering": "off",
        "proxy-read-timeout": str(longest_s + 30),
        "proxy-send-timeout": str(longest_s + 30),
        "proxy-body-size": "1g",
    }, "with one that the branch sets itself"
    assert timeouts == {"request": f"{longest_s + 30}s", "backendRequest": f"{longest_s + 30}s"}
    assert "annotations" not in find(objects("", BRANCHES["plain ingress"]), "Ingress")["metadata"]


def test_services_point_at_gateways_only() -> None:
    found = objects("values-demo.yaml")

    for name in ("rel-penstock", "rel-penstock-admin"):
        assert find(found, "Service", name)["spec"]["selector"]["app.kubernetes.io/component"] == "gateway"
    assert [port["targetPort"] for port in find(found, "Service", "rel-penstock")["spec"]["ports"]] == ["http"]


def test_the_image_is_the_one_that_was_named() -> None:
    assert f"image: {IMAGE}:0.1.0" in template().stdout
    assert f"image: {IMAGE}@sha256:" in template("", BRANCHES["names"]).stdout


def test_everything_lives_in_the_release_namespace() -> None:
    subjects = find(objects(), "RoleBinding")["subjects"]

    assert [subject["namespace"] for subject in subjects] == [NAMESPACE]
    assert not [each["kind"] for each in objects() if each["kind"].startswith("Cluster")], (
        "nothing that reaches beyond it"
    )


def test_the_schema_file_is_the_generated_one() -> None:
    assert chart_schema.TARGET.read_text(encoding="utf-8") == chart_schema.render(), "python -m deploy.chart_schema"


def test_the_template_of_defaults_is_the_generated_one() -> None:
    assert chart_defaults.TARGET.read_text(encoding="utf-8") == chart_defaults.render(), (
        "python -m deploy.chart_defaults"
    )


def test_every_value_is_explained_where_it_stands() -> None:
    values = list(chart_values.read(chart_values.VALUES.read_text(encoding="utf-8")))

    assert [value.path for value in values if not value.comment] == []
    assert len(values) > 100


def test_the_table_of_values_is_the_generated_one() -> None:
    table = chart_values.table(chart_values.VALUES.read_text(encoding="utf-8"))

    assert chart_values.TARGET.read_text(encoding="utf-8") == table, "python -m deploy.chart_values"


def test_versions_belong_together() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    ray = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)

    assert project is not None
    assert ray is not None
    assert chart["version"] == chart["appVersion"] == project[1]
    assert yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["rayVersion"] == ray[1]
