"""Pods of pools: GPUs, disks, shared memory, probes and the nodes that they may have."""

import re

import pytest
import yaml

from penstock.base.config import convert
from penstock.cli.serve_apps import PoolArguments
from penstock.workers.config import EngineConfig
from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import CHART, ROOT, Object, find, objects, pods, template


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
