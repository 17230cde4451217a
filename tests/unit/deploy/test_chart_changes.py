"""Changes of values: which leave the Ray cluster, which build a second one, and when the old one goes."""

import pytest
import yaml

from penstock.router.config import GatewayConfig
from tests.unit.deploy.charts import PRESETS, Object, find, objects

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
    "credentials for places of adapters": (
        "{secrets: {providers: keys}, adapters: {enabled: true}}",
        (
            "{secrets: {providers: keys}, adapters: {enabled: true, config: {sources: {s3: {access_key_env: A, "
            "secret_key_env: B, allow: [bucket]}}}}}"
        ),
    ),
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
