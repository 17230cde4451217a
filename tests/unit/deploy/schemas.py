"""Kubernetes' own schemas (of kubernetes-validate) and KubeRay's, for whole objects. Unknown fields are refused, as a
strict API server does, and two elements of a list that its keys (x-kubernetes-list-map-keys) call the same.

KubeRay's are in the file that PENSTOCK_TEST_CRDS names.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Object = dict[str, Any]

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")
OURS = ("RayService", "HTTPRoute", "Certificate", "ServiceMonitor", "PodMonitor", "PrometheusRule")
"""Kinds that Kubernetes itself does not have."""
DEFINITIONS = "/api/_definitions.json#"
"""How the schemas point at each other."""
KEYS = "x-kubernetes-list-map-keys"
KEY_DEFAULTS = {"protocol": "TCP"}
"""What a key is that is left out."""


def _same_twice(_: Any, keys: list[str], found: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy: a list of type map has each of
    its keys' values once."""
    elements = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    seen = Counter(tuple((key, each.get(key, KEY_DEFAULTS.get(key))) for key in keys) for each in elements)
    yield from (
        jsonschema.ValidationError(f"{dict(key)} stands there {count} times")
        for key, count in seen.items()
        if count > 1
    )


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {KEYS: _same_twice})


def mistakes(found: Object, version: str) -> list[str]:
    """What a server of that version would refuse in the object: path and reason."""
    group, _, api = found["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [found["kind"].lower(), group.split(".")[0].lower(), api.lower()]))
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in _validator(version, name).iter_errors(found)
    ]


@cache
def _folder(version: str) -> Path:
    return Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@cache
def _definitions(version: str) -> Object:
    found: Object = json.loads(
        (_folder(version) / "_definitions.json").read_text(encoding="utf-8").replace(DEFINITIONS, "#")
    )
    definitions: Object = found["$defs"]
    return definitions


@cache
def _validator(version: str, name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((_folder(version) / f"{name}.json").read_text(encoding="utf-8").replace(DEFINITIONS, "#"))
    schema.pop("$id", None)
    return Validator({**schema, "$defs": _definitions(version)})


@cache
def kuberay_text() -> str:
    """All of KubeRay's custom resource definitions; skips where there are none."""
    path = os.environ.get("PENSTOCK_TEST_CRDS")
    if not path:
        pytest.skip("PENSTOCK_TEST_CRDS names no file with KubeRay's custom resource definitions")
    return Path(path).read_text(encoding="utf-8")


NAME = {"type": "string", "minLength": 1, "maxLength": 253}
GATEWAY_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
REFERENCE = {"name": NAME, "namespace": NAME, "kind": NAME, "group": {"type": "string"}, "port": GATEWAY_PORT}


def object_of(properties: Object, *required: str) -> Object:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def _list(of: Object, most: int) -> Object:
    return {"type": "array", "items": of, "minItems": 1, "maxItems": most}


HTTPROUTE = jsonschema.Draft202012Validator(
    object_of(
        {
            "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
            "kind": {"const": "HTTPRoute"},
            "metadata": {"type": "object"},
            "spec": object_of(
                {
                    "parentRefs": _list(object_of({**REFERENCE, "sectionName": NAME}, "name"), 32),
                    "hostnames": _list(
                        {
                            "type": "string",
                            "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
                        },
                        16,
                    ),
                    "rules": _list(
                        object_of(
                            {
                                "matches": _list(
                                    object_of(
                                        {
                                            "path": object_of(
                                                {
                                                    "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                                    "value": {"pattern": "^/"},
                                                }
                                            )
                                        }
                                    ),
                                    64,
                                ),
                                "timeouts": object_of({"request": DURATION, "backendRequest": DURATION}),
                                "backendRefs": _list(
                                    object_of({**REFERENCE, "weight": {"type": "integer"}}, "name", "port"), 16
                                ),
                            }
                        ),
                        16,
                    ),
                }
            ),
        },
        "metadata",
        "spec",
    )
)
"""A schema of our own, of the fields that the chart uses, by version v1 of
https://gateway-api.sigs.k8s.io/reference/spec/#httproute; durations: GEP-2257. A reference to a Service needs its
port."""


@cache
def rayservice() -> jsonschema.Draft202012Validator:
    """Validator of a RayService of ray.io/v1."""
    document = next(text for text in kuberay_text().split("\n---\n") if "\n  name: rayservices.ray.io" in text)
    versions = yaml.load(document, Loader=yaml.CSafeLoader)["spec"]["versions"]
    structural = next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"]
    return Validator(_strict(structural))


def ray_mistakes(found: Object) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in rayservice().iter_errors(found)]


def _strict(node: Any) -> Any:
    """A structural schema of a custom resource as JSON Schema, without room for what it does not name."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = dict(_parts(node))
    if found.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"], **({"pattern": found["pattern"]} if "pattern" in found else {})}
    if node.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    if (
        node.get("properties")
        and "additionalProperties" not in node
        and not node.get("x-kubernetes-preserve-unknown-fields")
    ):
        found["additionalProperties"] = False
    return found


def _parts(node: Object) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key == "properties":
            yield key, {name: _strict(each) for name, each in value.items()}
        elif key == KEYS:
            yield key, value
        elif key in (
            "items",
            "additionalProperties",
            "type",
            "enum",
            "required",
            "pattern",
            "minimum",
            "maximum",
            "x-kubernetes-int-or-string",
        ):
            yield key, _strict(value)
