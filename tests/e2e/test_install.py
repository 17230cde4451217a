"""The chart on a real cluster: installed as docs/kubernetes.md says, and used by tenants."""

import json
import re
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

from tests.e2e.release import Release

pytestmark = pytest.mark.timeout(900)

LAYERS, HIDDEN, RANK = 30, 576, 4
"""Of SmolLM2-135M, and of an adapter for its queries."""
REVOKED_S = 5.0


def small_adapter(folder: Path) -> None:
    """In PEFT's form, with random weights."""
    random = numpy.random.default_rng(7)
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(LAYERS):
        tensors[place.format(layer, "A")] = random.normal(size=(RANK, HIDDEN)).astype(numpy.float32)
        tensors[place.format(layer, "B")] = (random.normal(size=(HIDDEN, RANK)) * 0.01).astype(numpy.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_every_pod_was_admitted_and_serves(release: Release) -> None:
    pods = release.kube.get("pods", "--namespace", release.namespace)["items"]
    running = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]

    assert len(running) == 8, "head, two gateways, two pools, Redis, two autoscalers"
    assert all(status["ready"] for pod in pods for status in pod["status"]["containerStatuses"])


def test_helm_test_gets_a_completion(release: Release) -> None:
    before = release.kube.client("used", url=release.url(), key=release.key())
    said = release.helm("test", release.name)

    assert re.search(r"Phase: +Succeeded", said), said
    assert release.kube.client("used", url=release.url(), key=release.key()) == before + 8, "the completion is on the tenant's bill"


def test_the_openai_client_streams_a_chat_through_the_service(release: Release) -> None:
    found = release.kube.client("streamed", url=release.url(), key=release.key(), model="demo")

    assert "Paris" in found["text"]
    assert found["chunks"] > 3


def test_a_tenant_and_a_key_are_made_and_revoked(release: Release) -> None:
    release.penstock("tenant", "create", "acme", "--max-parallel", "4")
    key = release.penstock("key", "create", "acme").strip()
    before = release.kube.client("status", url=release.url(), key=key)
    release.penstock("key", "revoke", key)
    after = release.kube.client("status_until", url=release.url(), key=key, wanted=401, within_s=REVOKED_S)

    assert (before, after) == (200, 401)
    assert "acme" in release.penstock("tenant", "list")


def test_an_adapter_of_a_tenant_answers(release: Release, tmp_path: Path) -> None:
    small_adapter(tmp_path)
    found = release.kube.client("upload", url=release.url(), key=release.key(), adapter="rivers", base="demo", folder=str(tmp_path))

    assert found["made"][0] == 201, found
    assert found["asked"][0] == 200, found
    assert found["asked"][1]["usage"]["completion_tokens"] == 4


def test_a_burst_spills_from_the_edge_pool_to_the_cloud_pool(release: Release) -> None:
    answers = release.kube.client("burst", url=release.url(), key=release.key(), model="demo", count=16, max_tokens=48)

    assert {answer["status"] for answer in answers} == {200}
    assert {answer["tier"] for answer in answers} == {"edge", "cloud"}, answers


def test_metrics_are_on_the_admin_service_and_not_where_tenants_are(release: Release) -> None:
    pod = release.kube.get("pod", release.pods("gateway")[0], "--namespace", release.namespace)
    address = pod["status"]["podIP"]

    assert release.kube.client("status", url=f"http://{address}:8001", key="", path="/metrics") == 200
    assert release.kube.client("status", url=release.url(), key="", path="/metrics") == 404
