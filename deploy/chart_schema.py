"""The chart's values.schema.json: what `helm` checks values with, generated, so that penstock.yaml's sections can't
drift from the code.

    python -m deploy.chart_schema      # writes deploy/helm/values.schema.json

JSON Schema draft 7, which every Helm 3 reads. Nothing may hold an unknown name, except where names are somebody else's:
labels, Kubernetes' affinity, vLLM's arguments.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from deploy.chart_bounds import bounded
from penstock.adapters.config import AdaptersConfig
from penstock.base.telemetry import TelemetryConfig
from penstock.cli.config import PoolConfig
from penstock.router.batches.config import BatchesConfig
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.tenancy.share import MAX_WEIGHT, MIN_WEIGHT, SERVICE_CLASSES
from penstock.tenancy.tariffs import TariffRule
from penstock.tenancy.tenants import TIER_POLICIES
from penstock.wire.money import MAX_BUDGET
from penstock.wire.targets import TargetsConfig

Schema = dict[str, Any]

TARGET = Path(__file__).parent / "helm" / "values.schema.json"
SECTIONS = (
    PoolConfig,
    ProviderConfig,
    GatewayConfig,
    TelemetryConfig,
    AdaptersConfig,
    BatchesConfig,
    TariffRule,
    TargetsConfig,
)
CHART_OWNED = {
    "GatewayConfig": ("host", "port", "admin_port", "tls"),
    "AdaptersConfig": ("folder", "import_folder"),
    "SourcesConfig": ("ca_file",),
    "BatchesConfig": ("folder",),
}
"""Fields that the chart sets itself."""

TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
QUANTITY: Schema = {"type": ["string", "number"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
SIZE: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|K|M|G|T)?$"}
PERIOD: Schema = {"type": "string", "pattern": "^[1-9][0-9]*(ms|s|m|h)$"}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
POLICY = {"enum": ["Always", "IfNotPresent", "Never"]}


def integer(least: int, most: int | None = None, nullable: bool = False) -> Schema:
    found: Schema = {"type": ["integer", "null"] if nullable else "integer", "minimum": least}
    return found if most is None else {**found, "maximum": most}


def items(of: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least}


def fields(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": list(required)} if required else found


PORT = integer(1, 65535)
AMOUNTS: Schema = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = fields(requests=AMOUNTS, limits=AMOUNTS)
TOLERATION = fields(
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
    tolerationSeconds=integer(0),
)
OPEN: Schema = {"type": "object"}
AFFINITY = fields(nodeAffinity=OPEN, podAffinity=OPEN, podAntiAffinity=OPEN)
SELECTOR = fields(matchLabels=LABELS, matchExpressions=items(OPEN))
PEERS = items(
    fields(
        podSelector=SELECTOR,
        namespaceSelector=SELECTOR,
        ipBlock=fields(("cidr",), cidr=WORD, **{"except": items(WORD)}),
    )  # as in a NetworkPolicy
)
PLACEMENT = {
    "nodeSelector": LABELS,
    "tolerations": items(TOLERATION),
    "affinity": AFFINITY,
    "priorityClassName": NAME,
    "annotations": LABELS,
}
TENANT_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
SPREAD: Schema = {"enum": ["ScheduleAnyway", "DoNotSchedule", "None"]}
RAY_POD = {"resources": RESOURCES, "tmpSize": SIZE, "shmSize": SIZE, **PLACEMENT}
POOL_POD = fields(
    **{**RAY_POD, "shmSize": {"anyOf": [SIZE, {"type": "null"}]}},
    cacheClaim=NAME,
    image=TEXT,
    gpus=integer(0, nullable=True),
    gpuResource=WORD,
    runtimeClassName=NAME,
    drainSeconds=integer(1, nullable=True),
    spread=SPREAD,
    zoneSpread=SPREAD,
)
LIMITS = {name: integer(0) for name in ("requests_per_minute", "tokens_per_minute", "max_parallel")}
LIMITS["budget"] = {"type": "number", "minimum": 0, "maximum": MAX_BUDGET}
TENANT = fields(
    ("name",),
    name={"type": "string", "pattern": f"^{TENANT_NAME}$"},
    **LIMITS,
    models=items(WORD),
    tier_policy={"enum": list(TIER_POLICIES)},
    weight={"type": "number", "minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT},
    service_class={"enum": list(SERVICE_CLASSES)},
)


def schema() -> Schema:
    """All of it."""
    found = fields(
        nameOverride=NAME,
        fullnameOverride=NAME,
        image=fields(
            repository=TEXT,
            tag=TEXT,
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=POLICY,
            pullSecrets=items(NAME),
        ),
        rayVersion={"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+$"},
        gateway=fields(
            **RAY_POD,
            replicas=integer(1, 1000),
            port=PORT,
            adminPort=PORT,
            config=_ref("GatewayConfig"),
            drainSeconds=integer(1, nullable=True),
            spread=SPREAD,
            zoneSpread=SPREAD,
        ),
        pools=items(_ref("PoolConfig"), least=1),
        podDefaults=POOL_POD,
        providers=items(_ref("ProviderConfig")),
        tariffs=items(_ref("TariffRule")),
        telemetry=_ref("TelemetryConfig"),
        targets=_ref("TargetsConfig"),
        stream=fields(accept_previous_hello=FLAG),
        tls=fields(stream=FLAG, gateway=FLAG, issuer=fields(name=NAME, kind={"enum": ["Issuer", "ClusterIssuer"]})),
        models=fields(
            mountPath={"type": "string", "pattern": "^/[^ ]+$"},
            existingClaim=NAME,
            cacheSize=SIZE,
            download=FLAG,
            tokenSecret=NAME,
        ),
        adapters=fields(
            enabled=FLAG,
            config=_ref("AdaptersConfig"),
            importClaim=NAME,
            caSecret=NAME,
            existingClaim=NAME,
            size=SIZE,
            storageClass=NAME,
            accessModes=items({"enum": ["ReadWriteOnce", "ReadWriteMany"]}, least=1),
        ),
        batches=fields(
            enabled=FLAG,
            config=_ref("BatchesConfig"),
            existingClaim=NAME,
            size=SIZE,
            storageClass=NAME,
            accessModes=items({"enum": ["ReadWriteOnce", "ReadWriteMany"]}, least=1),
        ),
        head=fields(**RAY_POD),
        upgrade=fields(deletionDelaySeconds=integer(0, nullable=True)),
        autoscaler=fields(
            enabled=FLAG,
            replicas=integer(1, 5),
            budget={"anyOf": [fields(("gpus",), gpus=integer(1)), {"type": "null"}]},
            resources=RESOURCES,
            **PLACEMENT,
        ),
        redis=_redis(),
        rayRedis=_ray_redis(),
        tenants=fields(first=items(TENANT), defaults=fields(**LIMITS)),
        backups=fields(
            enabled=FLAG,
            schedule=WORD,
            keep=integer(1, 10000),
            existingClaim=NAME,
            size=SIZE,
            storageClass=NAME,
        ),
        secrets=fields(
            cluster=NAME,
            redis=NAME,
            rayRedis=NAME,
            ray=NAME,
            tenants=NAME,
            providers=NAME,
            makeWithoutCluster=FLAG,
        ),
        service=fields(
            type={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            port=PORT,
            nodePort=integer(30000, 32767, nullable=True),
            annotations=LABELS,
        ),
        ingress=fields(
            enabled=FLAG,
            controller={"enum": ["nginx", "other"]},
            className=NAME,
            host=TEXT,
            tlsSecret=NAME,
            annotations=LABELS,
        ),
        httpRoute=fields(
            enabled=FLAG,
            parentRefs=items(
                fields(("name",), name=NAME, namespace=NAME, sectionName=NAME, port=PORT, group=TEXT, kind=WORD)
            ),
            hostnames=items(WORD),
            timeoutSeconds=integer(1, nullable=True),
        ),
        networkPolicy=_network_policy(),
        monitoring=fields(
            serviceMonitor=fields(enabled=FLAG, interval=PERIOD, labels=LABELS),
            rules=fields(enabled=FLAG, labels=LABELS, runbooks=WORD),
            dashboards=fields(enabled=FLAG, labels=LABELS, folder=TEXT),
        ),
        podDisruptionBudgets=FLAG,
        test=fields(tenant={"type": "string", "pattern": f"^({TENANT_NAME})?$"}, model=TEXT),
    )
    found["properties"]["global"] = OPEN  # Helm adds it where the chart is part of another one
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart penstock",
        **found,
        "$defs": _sections(),
    }


def _redis() -> Schema:
    return fields(
        **PLACEMENT,
        enabled=FLAG,
        address={"type": "string", "pattern": "^(rediss?://[^@/ ]+)?$"},
        username=TEXT,
        roles=FLAG,
        tlsSecret=NAME,
        image=fields(repository=WORD, tag=WORD, pullPolicy=POLICY),
        runAsUser=integer(1),
        resources=RESOURCES,
        maxMemory={"type": "string", "pattern": "^[0-9]+(kb|mb|gb)?$"},
        persistence=fields(enabled=FLAG, size=SIZE, storageClass=NAME, whenDeleted={"enum": ["Retain", "Delete"]}),
    )


def _ray_redis() -> Schema:
    taken = ("enabled", "resources", "maxMemory", "persistence", *PLACEMENT)
    return fields(**{name: _redis()["properties"][name] for name in taken})


def _network_policy() -> Schema:
    return fields(
        enabled=FLAG,
        clients=PEERS,
        otherClients={"enum": ["Allow", "Deny"]},
        monitoring=PEERS,
        operator=items(PEERS["items"], least=1),
        dns=PEERS,
        dnsPorts=items(PORT, least=1),
        apiServer=fields(cidr=WORD, ports=items(PORT, least=1)),
        redis=PEERS,
        redisPorts=items(PORT),
        telemetry=PEERS,
        providers=PEERS,
        internetExcept=items(WORD),
    )


def _sections() -> dict[str, Schema]:
    """penstock.yaml's own sections, from the structs that read it."""
    _, components = msgspec.json.schema_components(SECTIONS, ref_template="#/$defs/{name}")
    found = bounded({name: _bare(component) for name, component in components.items()})
    for name, owned in CHART_OWNED.items():
        for field in owned:
            found[name]["properties"].pop(field, None)
    del found["TlsFiles"]  # of fields that the chart owns
    pool = found["PoolConfig"]["properties"]
    pool["name"] = {"type": "string", "pattern": "^[a-z][a-z0-9]*(-[a-z0-9]+)*$", "maxLength": 24}
    pool["replicas"] = integer(1, 1000)
    pool["pod"] = POOL_POD
    found["ProviderConfig"]["properties"]["api_key_env"] = {
        "type": ["string", "null"],
        "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
    }
    return found


def _bare(node: Any) -> Any:
    """The schema without titles, defaults and descriptions, which values.yaml has."""
    if isinstance(node, dict):
        kept = {key: value for key, value in node.items() if key not in ("title", "default", "description")}
        return {
            key: {name: _bare(each) for name, each in value.items()} if key == "properties" else _bare(value)
            for key, value in kept.items()
        }
    return [_bare(each) for each in node] if isinstance(node, list) else node


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def render() -> str:
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
