"""The chart on a real cluster: installed as docs/kubernetes.md says, and used by tenants."""

import base64
import json
import re
from pathlib import Path

import numpy
import pytest
import safetensors.numpy

from tests.e2e.kube import until
from tests.e2e.release import Release

pytestmark = pytest.mark.timeout(900)

LAYERS, HIDDEN, RANK = 30, 576, 4
"""Sizes of SmolLM2-135M, and of an adapter for its queries."""
REVOKED_S = 5.0
EXPLAINED_S = 30.0
"""Seconds for the autoscaler to know a pool's load: its window is 15 s."""


def small_adapter(folder: Path) -> None:
    """Writes an adapter in PEFT's form, with random weights."""
    random = numpy.random.default_rng(7)
    place = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(LAYERS):
        tensors[place.format(layer, "A")] = random.normal(size=(RANK, HIDDEN)).astype(numpy.float32)
        tensors[place.format(layer, "B")] = (random.normal(size=(HIDDEN, RANK))).astype(numpy.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
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
    billed = release.kube.client("used", url=release.url(), key=release.key()) - before
    assert 0 < billed <= 8, "the completion, which may end early, is on the tenant's bill"


def test_the_openai_client_streams_a_chat_through_the_service(release: Release) -> None:
    found = release.kube.client("streamed", url=release.url(), key=release.key(), model="demo")

    assert "Paris" in found["text"]
    assert found["chunks"] > 3


def test_where_the_api_speaks_tls_it_answers_nobody_in_plain_text(release: Release) -> None:
    if not release.is_encrypted:
        pytest.skip("PENSTOCK_TEST_TLS is not set")
    assert release.kube.client("refused", url=release.url().replace("https", "http"))
    found = release.kube.get("secrets", "--namespace", release.namespace)["items"]
    tls = [secret["metadata"]["name"] for secret in found if secret["type"] == "kubernetes.io/tls"]
    names = {name.rpartition("-tls-")[2] for name in tls}
    assert {"http", "gateway", "replica"} <= names


def test_explain_says_why_the_pool_has_the_replicas_that_it_has(release: Release) -> None:
    until(lambda: "The target is 1: what there is, is right." in explained(release), "a steady pool", EXPLAINED_S)
    said = explained(release)

    assert said.splitlines()[0] == "cloud"
    assert "It may have 1 (by its configuration) to 2 (by its configuration)." in said
    assert re.search(r"replicas: serving, starting, stopping\W+1, 0, 0\b", said), said
    assert re.search(r"gateways that report\W+2\b", said), said


def explained(release: Release) -> str:
    return release.penstock("autoscale", "explain")


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
    found = release.kube.client(
        "upload", url=release.url(), key=release.key(), adapter="rivers", base="demo", folder=str(tmp_path)
    )

    assert found["made"][0] == 201, found
    assert found["asked"][0] == 200, found
    assert found["asked"][1]["usage"]["completion_tokens"] == 4
    assert found["asked"][1]["choices"][0]["text"] != found["base"]["choices"][0]["text"], "its weights count"


def test_a_burst_spills_from_the_edge_pool_to_the_cloud_pool(release: Release) -> None:
    answers = release.kube.client("burst", url=release.url(), key=release.key(), model="demo", count=16, max_tokens=48)

    assert {answer["status"] for answer in answers} == {200}
    assert {answer["tier"] for answer in answers} == {"edge", "cloud"}, answers
    assert all(
        (answer["tier"] == "edge") == (answer["reason"] in ("preferred", "none_better")) for answer in answers
    ), answers


def test_metrics_are_on_the_admin_service_and_not_where_tenants_are(release: Release) -> None:
    pages = [release.kube.client("page", url=url, path="/metrics") for url in release.ends(f"{release.service}-admin")]

    assert len(pages) == 2
    assert all("penstock_requests_total" in page for page in pages)
    assert release.kube.client("status", url=release.url(), key="", path="/metrics") == 404


def test_the_notes_commands_work(release: Release) -> None:
    notes = release.helm("get", "notes", release.name)
    commands = [line.strip() for line in notes.splitlines() if line.startswith("     ")]
    said = release.kube.run(
        "bash", "-c", "\n".join(["set -euo pipefail", *commands, "echo key $OPENAI_API_KEY"]), timeout_s=300
    )

    assert len(commands) == 3
    assert re.search(r"Phase: +Succeeded", said), said
    assert said.splitlines()[-1] == f"key {release.key()}"


def test_no_secret_is_in_a_log_or_on_a_command_line(release: Release) -> None:
    """The one exception is Redis' password in the head's own container, where Ray has it as an argument
    (docs/kubernetes.md)."""
    found = release.kube.get("secrets", "--namespace", release.namespace)["items"]
    secrets = {
        base64.b64decode(value).decode(): f"{secret['metadata']['name']}/{name}"
        for secret in found
        if secret["type"] == "Opaque"
        for name, value in secret["data"].items()
    }
    told = set()
    for pod in release.kube.get("pods", "--namespace", release.namespace, "--field-selector=status.phase=Running")[
        "items"
    ]:
        name, part = pod["metadata"]["name"], pod["metadata"]["labels"]["app.kubernetes.io/component"]
        try:
            said = release.kubectl("logs", name, "--all-containers") + release.kubectl(
                "exec", name, "--", "bash", "-c", EVERYTHING_SAID
            )
        except AssertionError:
            here = release.kube.get("pods", "--namespace", release.namespace, f"--field-selector=metadata.name={name}")[
                "items"
            ]
            if any("deletionTimestamp" not in pod["metadata"] for pod in here):
                raise
            continue  # the autoscaler has let it go meanwhile, as it does behind the burst
        assert "/penstock" in said or "redis" in said or "ray" in said, "something was read"
        told |= {(part, secret) for value, secret in secrets.items() if value in said}

    assert len(secrets) >= 4, "the tenant's key, Redis' password, the cluster's secret, Ray's token"
    assert told <= {("head", f"{release.service}-redis/password")}, told


EVERYTHING_SAID = (
    r"cat /proc/[0-9]*/cmdline | tr '\0' ' '; "
    r"find /tmp/ray/session_latest/logs -type f -exec cat {} + 2>/dev/null | tr -d '\0'; true"
)
"""Command lines of all processes, and Ray's and Serve's log files, in a container."""
