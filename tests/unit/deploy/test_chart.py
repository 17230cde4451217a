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
from penstock.router.config import GatewayConfig
from penstock.wire.discovery import GATEWAY_APP, pool_app_name
from penstock.workers.config import EngineConfig
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


CHANGED_POOL = """
pools:
  - name: demo
    served_names: [other]
    replicas: 2
    engine: {max_num_seqs: 3}
    pod: {resources: {requests: {cpu: "1", memory: 2Gi}, limits: {memory: 4Gi}}}
"""
UP = "name: up, base_url: 'https://api.example.com/v1', model: m, served_names: [demo]"
IN_PLACE = {
    "a model": ("", CHANGED_POOL),
    "gateway.config": ("", "gateway: {config: {max_queue: 7, queue_timeout_s: 9.0, ttft_target_s: 0.3}}"),
    "telemetry": ("", "telemetry: {otlp_endpoint: 'http://collector:4318', sample_ratio: 1.0}"),
    "a provider without a key": ("", f"providers: [{{{UP}}}]"),
    "a provider with a known key": (
        f"{{secrets: {{providers: keys}}, providers: [{{{UP}, api_key_env: K}}]}}",
        (
            f"{{secrets: {{providers: keys}}, providers: [{{{UP}, api_key_env: K}}, {{{UP.replace('up', 'too')}, "
            f"api_key_env: K}}]}}"
        ),
    ),
    "the deadline, with drainSeconds": (
        "gateway: {drainSeconds: 90}",
        "gateway: {drainSeconds: 90, config: {request_timeout_s: 60.0}}",
    ),
    "replicas": (CHANGED_POOL, "gateway: {replicas: 4}" + CHANGED_POOL.replace("replicas: 2", "replicas: 3")),
}
"""Values before and after each change that docs/kubernetes.md has under Changes."""
ANEW = {
    "the deadline": ("", "gateway: {config: {request_timeout_s: 60.0}}"),
    "a provider with a new key": ("", f"{{secrets: {{providers: keys}}, providers: [{{{UP}, api_key_env: K}}]}}"),
    "a pool more": ("", "pools: [{name: demo}, {name: more}]"),
    "the image": ("", "image: {tag: new}"),
}


def versions_of(before: str, after: str) -> tuple[Object, Object]:
    """The RayService's specification without the counts, which KubeRay ignores."""
    found = tuple(find(objects("", values), "RayService")["spec"] for values in (before, after))
    for spec in found:
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            group.pop("replicas")
    return found[0], found[1]


@pytest.mark.parametrize("what", IN_PLACE)
def test_what_the_document_calls_in_place_leaves_the_ray_cluster_alone(what: str) -> None:
    before, after = versions_of(*IN_PLACE[what])

    assert before["rayClusterConfig"] == after["rayClusterConfig"], "another pod template would build a second cluster"
    assert before["serveConfigV2"] != after["serveConfigV2"]


@pytest.mark.parametrize("what", ANEW)
def test_what_the_document_calls_a_second_cluster_is_one(what: str) -> None:
    before, after = versions_of(*ANEW[what])

    assert before["rayClusterConfig"] != after["rayClusterConfig"]


def test_pods_say_nothing_of_the_chart_version() -> None:
    for group in [
        find(objects(), "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"],
        *find(objects(), "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"],
    ]:
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & group["template"]["metadata"]["labels"].keys()


def test_the_old_cluster_outlives_the_longest_stream() -> None:
    for preset in PRESETS:
        spec = find(objects(preset), "RayService")["spec"]
        apps = {app["name"]: app for app in yaml.safe_load(spec["serveConfigV2"])["applications"]}
        longest = apps["gateway"]["args"]["config"]["gateway"].get(
            "request_timeout_s", GatewayConfig().request_timeout_s
        )
        assert spec["rayClusterDeletionDelaySeconds"] > longest
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            pod = group["template"]["spec"]
            env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
            drain_s = apps[group["groupName"]]["args"]["drain_s"]
            assert pod["terminationGracePeriodSeconds"] > int(env["PENSTOCK_DRAIN_S"]) > drain_s >= longest


def test_the_old_cluster_goes_at_once_where_that_is_asked() -> None:
    assert (
        find(objects("", "{upgrade: {deletionDelaySeconds: 0}}"), "RayService")["spec"][
            "rayClusterDeletionDelaySeconds"
        ]
        == 0
    )


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


@pytest.mark.parametrize("branch", ["downloads", "downloads beside a claim"])
def test_downloads_lie_on_a_volume_of_the_size_that_is_set_for_them(branch: str) -> None:
    size = {"downloads": "50Gi", "downloads beside a claim": "30Gi"}[branch]
    for pod in pods(objects("", BRANCHES[branch])):
        if "ray.io/group" in pod.labels:
            container = pod.spec["containers"][0]
            home = next(each["value"] for each in container["env"] if each["name"] == "HF_HOME")
            mount = max(
                (each for each in container["volumeMounts"] if home.startswith(each["mountPath"])),
                key=lambda each: len(each["mountPath"]),
            )
            volume = next(each for each in pod.spec["volumes"] if each["name"] == mount["name"])
            assert volume["emptyDir"] == {"sizeLimit": size}, pod.owner
            assert not mount.get("readOnly")


def test_the_demo_fits_the_node_that_it_names_with_two_ray_clusters() -> None:
    """All replicas that a pool may have, in both."""
    text = (CHART / "values-demo.yaml").read_text(encoding="utf-8")
    named = re.search(r"(\d+) cores and (\d+) GiB", text)
    total = re.search(r"([\d.]+) GiB, which", text)
    most = {
        f"pool-{pool['name']}": pool.get("autoscale", pool.get("replicas"))["max_replicas"]
        for pool in yaml.safe_load(text)["pools"]
        if "autoscale" in pool
    }
    cores, mib = 0.0, 0.0
    for pod in pods(objects("values-demo.yaml")):
        requests = pod.spec["containers"][0]["resources"]["requests"]
        count = most.get(pod.labels.get("ray.io/group", ""), pod.replicas) * (2 if "ray.io/group" in pod.labels else 1)
        cores += count * float(requests["cpu"].removesuffix("m")) / 1000
        mib += count * float(requests["memory"].removesuffix("Mi"))

    assert named is not None
    assert total is not None
    assert cores <= int(named[1])
    assert mib / 1024 <= int(named[2]) - 1, "and Kubernetes' own"
    assert round(mib / 1024, 1) == float(total[1])


def test_gpus_are_requested_from_kubernetes() -> None:
    groups = {
        group["groupName"]: group
        for group in find(objects("values-production.yaml"), "RayService")["spec"]["rayClusterConfig"][
            "workerGroupSpecs"
        ]
    }
    gpus = {
        name: group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
        for name, group in groups.items()
    }

    assert gpus == {"gateway": None, "pool-edge": None, "pool-cloud": "2"}


@pytest.mark.parametrize(
    ("pool", "gpus", "size"),
    [
        ("{name: a}", None, None),
        ("{name: a, engine: {device: cuda}}", "1", None),
        ("{name: a, engine: {device: cuda}, pod: {gpus: null}}", "1", None),
        ("{name: a, engine: {device: cuda}, pod: {gpus: 1}}", "1", None),
        ("{name: a, engine: {device: cuda, tensor_parallel_size: 1}, pod: {gpus: 1}}", "1", 1),
        ("{name: a, engine: {device: cuda}, pod: {gpus: 4}}", "4", 4),
        ("{name: a, engine: {device: cuda, tensor_parallel_size: 2}}", "2", 2),
        ("{name: a, engine: {device: cuda, tensor_parallel_size: 2}, pod: {gpus: 2}}", "2", 2),
        ("{name: a, engine: {device: cuda, runner: vllm}}", "1", None),
        ("{name: a, engine: {device: cuda, runner: vllm, kv_dtype: auto}, pod: {gpus: 2}}", "2", 2),
        ("{name: a, engine: {device: cuda, runner: vllm, tensor_parallel_size: 2}}", "2", 2),
        ("{name: a, engine: {tensor_parallel_size: 2}}", None, 2),
        ("{name: a, engine: {tensor_parallel_size: 2}, pod: {gpus: 0}}", None, 2),
        ("{name: a, engine: {runner: vllm, tensor_parallel_size: 3}}", None, 3),
    ],
)
def test_a_pools_model_is_divided_among_the_gpus_of_its_pods(pool: str, gpus: str | None, size: int | None) -> None:
    spec = find(objects("", f"pools: [{pool}]"), "RayService")["spec"]

    groups = {group["groupName"]: group for group in spec["rayClusterConfig"]["workerGroupSpecs"]}
    limits = groups["pool-a"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    applications = {each["name"]: each for each in yaml.safe_load(spec["serveConfigV2"])["applications"]}
    of_replica = applications["pool-a"]["args"]["pool"]
    assert limits.get("nvidia.com/gpu") == gpus
    assert of_replica.get("engine", {}).get("tensor_parallel_size") == size
    assert applications["gateway"]["args"]["config"]["pools"] == [of_replica]


def test_gpus_of_all_pools_can_be_set_at_once_and_a_pools_own_go_before_them() -> None:
    values = """
podDefaults: {gpus: 4}
pools: [{name: a, engine: {device: cuda}}, {name: b, engine: {device: cuda}, pod: {gpus: 1}}]
"""
    spec = find(objects("", values), "RayService")["spec"]
    sizes = {
        each["args"]["pool"]["name"]: each["args"]["pool"]["engine"].get("tensor_parallel_size")
        for each in yaml.safe_load(spec["serveConfigV2"])["applications"]
        if "pool" in each["args"]
    }

    assert sizes == {"a": 4, "b": None}


def pool_pod(values: str, name: str = "a") -> Object:
    """Spec of a pool's pod."""
    (pod,) = [pod for pod in pods(objects("", values)) if pod.labels.get("ray.io/group") == f"pool-{name}"]
    return pod.spec


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        ("{name: a}", "256Mi"),
        ("{name: a, engine: {device: cuda}}", "256Mi"),
        ("{name: a, engine: {device: cuda, tensor_parallel_size: 4}}", "4Gi"),
        ("{name: a, engine: {device: cuda}, pod: {gpus: 2}}", "2Gi"),
        ("{name: a, engine: {tensor_parallel_size: 2}}", "2Gi"),
        ("{name: a, engine: {device: cuda, runner: vllm, tensor_parallel_size: 2}, pod: {shmSize: 3Gi}}", "3Gi"),
    ],
)
def test_a_model_in_parts_has_shared_memory_for_their_sums(pool: str, size: str) -> None:
    (shared,) = [volume for volume in pool_pod(f"pools: [{pool}]")["volumes"] if volume["name"] == "shm"]

    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_what_is_compiled_outlives_a_pod_on_a_claim() -> None:
    values = "{podDefaults: {cacheClaim: kernels}, pools: [{name: a}, {name: b, pod: {cacheClaim: ''}}]}"
    spec, without = pool_pod(values), pool_pod(values, "b")
    (container,) = spec["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "cache"]

    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "kernels"}} in spec["volumes"]
    assert (env["XDG_CACHE_HOME"], env["TRITON_CACHE_DIR"]) == (folder, f"{folder}/triton")
    assert "cache" not in {volume["name"] for volume in without["volumes"]}
    assert not {"XDG_CACHE_HOME", "TRITON_CACHE_DIR"} & {each["name"] for each in without["containers"][0]["env"]}


def test_a_replica_that_compiles_for_minutes_is_not_ready_and_not_killed() -> None:
    """Probes that restart ask the raylet, which answers meanwhile; readiness, which does not, waits for the replica."""
    (container,) = pool_pod("pools: [{name: a, engine: {device: cuda}}]")["containers"]

    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert "ready" in container["readinessProbe"]["exec"]["command"][-1]


def test_a_gpu_of_another_maker_is_asked_for_by_its_own_name() -> None:
    values = "{pools: [{name: a, engine: {device: cuda}, pod: {gpus: 2, gpuResource: amd.com/gpu}}]}"
    (pod,) = [pod for pod in pods(objects("", values)) if pod.labels.get("ray.io/group") == "pool-a"]

    limits = pod.spec["containers"][0]["resources"]["limits"]
    assert {name: count for name, count in limits.items() if "/gpu" in name} == {"amd.com/gpu": "2"}


def engines(preset: str) -> dict[str, EngineConfig]:
    """What the pools of a preset compute with, as their replicas read it."""
    serve = yaml.safe_load(find(objects(preset), "RayService")["spec"]["serveConfigV2"])
    apps = [app for app in serve["applications"] if app["name"].startswith("pool-")]
    return {pool.name: pool.engine for pool in (convert(app["args"], PoolArguments, name="args").pool for app in apps)}


def test_the_small_gpu_preset_serves_a_quantized_model_with_a_draft_fp8_keys_and_values_and_adapters() -> None:
    engine = engines("values-gpu-small.yaml")["llama"]
    values = yaml.safe_load((CHART / "values-gpu-small.yaml").read_text(encoding="utf-8"))

    assert "AWQ" in values["pools"][0]["model"]
    assert (engine.device, engine.kv_dtype, engine.num_gpus) == ("cuda", "fp8", 1)
    assert (engine.speculation.method, engine.speculation.model) == ("draft", "meta-llama/Llama-3.2-1B-Instruct")
    assert engine.adapters.slots > 0
    assert values["adapters"]["enabled"]
    assert find(objects("values-gpu-small.yaml"), "PersistentVolumeClaim", "rel-penstock-adapters")


def test_the_small_gpu_preset_runs_without_a_draft_model_too() -> None:
    values = """
pools:
  - name: qwen
    model: Qwen/Qwen2.5-7B-Instruct-AWQ
    engine: {device: cuda, kv_dtype: fp8, speculation: {method: ngram}}
"""

    assert template("values-gpu-small.yaml", values).returncode == 0


def test_the_pool_of_vllm_that_the_document_shows_is_one() -> None:
    document = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    shown = re.search(r"^```yaml\n(pools:\n  - name: big\n.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert shown is not None
    found = objects("", f"{shown[1]}models: {{existingClaim: checkpoints}}")
    (pod,) = [pod for pod in pods(found) if pod.labels.get("ray.io/group") == "pool-big"]
    (container,) = pod.spec["containers"]
    apps = {
        app["name"]: app for app in yaml.safe_load(find(found, "RayService")["spec"]["serveConfigV2"])["applications"]
    }
    engine = convert(apps["pool-big"]["args"], PoolArguments, name="args").pool.engine

    assert container["image"].endswith(":cuda-vllm")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert (engine.runner, engine.num_gpus) == ("vllm", 2)


def test_the_production_preset_divides_its_large_model_between_two_gpus() -> None:
    found = engines("values-production.yaml")

    assert {name: (engine.tensor_parallel_size, engine.num_gpus) for name, engine in found.items()} == {
        "edge": (1, 0),
        "cloud": (2, 2),
    }


def test_pods_are_spread_as_the_values_say_over_nodes_that_they_may_have() -> None:
    found = {
        preset or values: {
            pod.owner.rsplit(" ", 1)[1]: {
                each["topologyKey"].rpartition("/")[2]: each["whenUnsatisfiable"]
                for each in pod.spec.get("topologySpreadConstraints", [])
            }
            for pod in pods(objects(preset, BRANCHES.get(values, "")))
            if pod.labels["app.kubernetes.io/component"] in ("gateway", "pool")
        }
        for preset, values in (("values-production.yaml", ""), ("", "placed"))
    }
    constraints = [
        each
        for pod in pods(objects("values-production.yaml"))
        for each in pod.spec.get("topologySpreadConstraints", [])
    ]

    soft = {"hostname": "ScheduleAnyway", "zone": "ScheduleAnyway"}
    assert found["values-production.yaml"] == {
        "gateway": {**soft, "hostname": "DoNotSchedule"},
        "pool-edge": soft,
        "pool-cloud": soft,
    }
    assert found["placed"] == {"gateway": {"zone": "DoNotSchedule"}, "pool-big": {}}
    assert {each["nodeTaintsPolicy"] for each in constraints} == {"Honor"}


def test_jobs_go_where_the_autoscaler_goes() -> None:
    """Where every node has a taint, an install would wait for them forever."""
    values = (
        "autoscaler: {nodeSelector: {a: b}, tolerations: [{key: k, operator: Exists}], "
        "affinity: {nodeAffinity: {}}, priorityClassName: high}"
    )
    placed = {
        pod.owner: {key: pod.spec.get(key) for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName")}
        for pod in pods(objects("", values))
    }

    for owner in ("Job rel-penstock-tenants", "Pod rel-penstock-test"):
        assert placed[owner] == placed["Deployment rel-penstock-autoscaler"]
    assert placed["Deployment rel-penstock-autoscaler"]["nodeSelector"] == {"a": "b"}


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
