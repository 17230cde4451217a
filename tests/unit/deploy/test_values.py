"""Every value does something: changed alone, it changes what is rendered."""

import re
from typing import Any

import pytest
import yaml

from deploy import chart_schema, chart_values
from tests.unit.deploy.charts import CHART, template

PLACES = {
    "secrets.providers": (
        "{secrets: {providers: s}, "
        "providers: [{name: up, base_url: 'http://x', model: m, served_names: [demo], api_key_env: K}]}"
    ),
    "adapters.enabled": "{}",
    "ingress.enabled": "{}",
    "httpRoute.enabled": "httpRoute: {parentRefs: [{name: public}]}",
    "redis.address": "{redis: {enabled: false, address: 'redis://b:1'}, secrets: {redis: s}}",
    "redis.enabled": "{redis: {address: 'redis://b:1'}, secrets: {redis: s}}",
    "redis.roles": "{secrets: {redis: s}}",
    "redis.username": "{redis: {enabled: false, address: 'redis://b:1'}, secrets: {redis: s}}",
    "networkPolicy.redis": "{redis: {enabled: false, address: 'redis://b:1'}, secrets: {redis: s}}",
    "networkPolicy.redisPorts": "{redis: {enabled: false, address: 'redis://b:1'}, secrets: {redis: s}}",
    "rayRedis.enabled": "{}",
    "rayRedis": "rayRedis: {enabled: true}",
    "secrets.rayRedis": "rayRedis: {enabled: true}",
    "networkPolicy.telemetry": "telemetry: {otlp_endpoint: 'http://x'}",
    "networkPolicy.providers": "providers: [{name: up, base_url: 'http://x', model: m, served_names: [demo]}]",
    "networkPolicy.internetExcept": "models: {download: true}",
    "service.nodePort": "service: {type: NodePort}",
    "tls.issuer.kind": "tls: {stream: true, issuer: {name: ca}}",
    "tls.issuer.name": "tls: {stream: true}",
    "podDefaults.resources": "pools: [{name: demo}]",
    "podDefaults.gpuResource": "pools: [{name: demo, engine: {device: cuda}}]",
    "podDefaults.gpus": "pools: [{name: demo, engine: {device: cuda}}]",
    "ingress": "ingress: {enabled: true}",
    "tenants.defaults": "tenants: {first: []}",
    "httpRoute": "httpRoute: {enabled: true, parentRefs: [{name: public}]}",
    "autoscaler.budget": "pools: [{name: demo, autoscale: {gpus: 1}}]",
    "backups.enabled": "{}",
    "backups": "backups: {enabled: true}",
    "adapters": "adapters: {enabled: true}",
    "batches.enabled": "{}",
    "monitoring.serviceMonitor.enabled": "{}",
    "monitoring.serviceMonitor": "monitoring: {serviceMonitor: {enabled: true}}",
    "monitoring.rules.enabled": "{}",
    "monitoring.rules": "monitoring: {rules: {enabled: true}}",
    "monitoring.dashboards.enabled": "{}",
    "monitoring.dashboards": "monitoring: {dashboards: {enabled: true}}",
    "batches": "batches: {enabled: true}",
}
"""Where a value has an effect only beside others: a path, or its beginning, to YAML."""
PLACING = ("nodeSelector", "tolerations", "affinity", "priorityClassName", "annotations")
PEER = [{"ipBlock": {"cidr": "192.0.2.0/24"}}]
CHANGED: dict[str, Any] = {
    "fullnameOverride": "other",
    "image.digest": "sha256:" + 64 * "a",
    "rayVersion": "9.9.9",
    "gateway.port": 8005,
    "gateway.adminPort": 8006,
    "gateway.drainSeconds": 77,
    "podDefaults.gpus": 3,
    "podDefaults.shmSize": "7Gi",
    "podDefaults.drainSeconds": 77,
    "upgrade.deletionDelaySeconds": 77,
    "httpRoute.timeoutSeconds": 77,
    "gateway.config": {"max_queue": 7},
    "pools": [{"name": "other"}],
    "providers": [{"name": "up", "base_url": "http://x", "model": "m", "served_names": ["demo"]}],
    "telemetry": {"sample_ratio": 0.5},
    "targets": {"interactive": {"ttft_s": 0.5}},
    "stream": {"accept_previous_hello": True},
    "models.mountPath": "/other",
    "adapters.config": {"max_per_tenant": 7},
    "adapters.accessModes": ["ReadWriteOnce"],
    "redis.address": "redis://other:1",
    "redis.maxMemory": "7mb",
    "rayRedis.maxMemory": "7mb",
    "networkPolicy.redisPorts": [26379],
    "adapters.size": "77Gi",
    "tariffs": [{"model": "demo", "input": 1.0, "output": 4.0}],
    "batches.config": {"max_lines": 7},
    "batches.accessModes": ["ReadWriteOnce"],
    "batches.size": "77Gi",
    "autoscaler.budget": {"gpus": 7},
    "monitoring.serviceMonitor.interval": "77s",
    "monitoring.serviceMonitor.labels": {"other": "7"},
    "monitoring.rules.labels": {"other": "7"},
    "monitoring.dashboards.labels": {"other": "7"},
    "backups.schedule": "7 7 * * *",
    "tenants.first": [{"name": "other"}],
    "tenants.defaults": {"max_parallel": 7},
    "secrets.tenants": "other",
    "image.pullSecrets": ["other"],
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.hostnames": ["other.example.com"],
    "networkPolicy.apiServer.ports": [7],
    "networkPolicy.apiServer.cidr": "192.0.2.1/32",
    "networkPolicy.dnsPorts": [7],
    "networkPolicy.internetExcept": ["192.0.2.0/24"],
    "service.nodePort": 30007,
}
"""What the schema alone does not tell."""
NEEDED = ("image.repository", "secrets.makeWithoutCluster")
RANDOM = re.compile(r"^( *[\"\w.-]+: )[\w+/]{20,}=*$", re.MULTILINE)
"""Generated secrets."""


def schema_of(path: str) -> dict[str, Any]:
    found: dict[str, Any] = chart_schema.schema()
    for name in path.split("."):
        found = found["properties"][name]
    return found


def default_of(path: str) -> Any:
    found = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name in path.split("."):
        found = found[name]
    return found


def other(path: str) -> Any:
    """A value that the schema takes, and that is not the default."""
    if path in CHANGED:
        return CHANGED[path]
    schema, default = schema_of(path), default_of(path)
    if "enum" in schema:
        return next(each for each in schema["enum"] if each != default)
    if path.endswith("resources"):
        return {"requests": {"cpu": "7", "memory": "7Gi"}, "limits": {"memory": "77Gi"}}
    if schema == chart_schema.PEERS or path.endswith("operator"):
        return PEER
    if schema == chart_schema.SIZE:
        return "7Gi"
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    return not default if kind == "boolean" else default + 1 if kind == "integer" else "zz9"


def placed(path: str) -> Any:
    """A value with the path in it."""
    token = path.replace(".", "-").lower()
    name = path.rpartition(".")[2]
    if name == "tolerations":
        return [{"key": token, "operator": "Exists"}]
    return {"affinity": {"nodeAffinity": {"zz": token}}, "priorityClassName": token}.get(name, {"zz": token})


def rendered(values: str) -> str:
    found = template("", values)
    assert found.returncode == 0, (values, found.stderr)
    return RANDOM.sub(r"\1RANDOM", found.stdout)


def at(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def is_used(path: str) -> bool:
    base = next(
        (PLACES[place] for place in (path, path.rpartition(".")[0], path.split(".")[0]) if place in PLACES), "{}"
    )
    return rendered(base) != rendered(yaml.safe_dump(merged(yaml.safe_load(base), at(path, other(path)))))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return below | above | both


def paths() -> list[str]:
    """Paths of all values that can be set one by one, but for what is needed to render anything."""
    values = [value.path for value in chart_values.read(chart_values.VALUES.read_text(encoding="utf-8"))]
    return [path for path in values if not any(each.startswith(f"{path}.") for each in values) and path not in NEEDED]


def test_what_places_and_annotates_a_part_reaches_its_pods() -> None:
    """All at once: each can be told from the others."""
    values: dict[str, Any] = {"ingress": {"enabled": True}, "rayRedis": {"enabled": True}}
    placing = [path for path in paths() if path.rpartition(".")[2] in PLACING]
    for path in placing:
        values = merged(values, at(path, placed(path)))
    text = rendered(yaml.safe_dump(values))

    assert len(placing) > 25
    assert [path for path in placing if not re.search(rf"\b{path.replace('.', '-').lower()}\b", text)] == []


SINGLE = [path for path in paths() if path.rpartition(".")[2] not in PLACING]


@pytest.mark.parametrize("section", dict.fromkeys(path.split(".")[0] for path in SINGLE))
def test_every_other_value_of_a_section_changes_what_is_rendered(section: str) -> None:
    found = {path: is_used(path) for path in SINGLE if path.split(".")[0] == section}

    assert [path for path, used in found.items() if not used] == []


def test_the_comparison_sees_a_value_that_nothing_uses() -> None:
    assert len(SINGLE) > 80
    assert rendered("{}") == rendered(""), "what is random is left out"
    assert rendered("{}") == rendered("global: {unused: 1}")
