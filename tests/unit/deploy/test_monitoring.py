"""The chart's objects for the Prometheus operator and for Grafana's sidecar: off until they are asked for."""

import json
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.dashboards import outputs
from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import NAMESPACE, Object, find, objects, pods, template
from tests.unit.deploy.schemas import object_of

MONITORED, PLAIN = BRANCHES["monitored"], BRANCHES["monitored without an operator's labels"]
KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
DURATION = {"type": "string", "pattern": "^([0-9]+(d|h|m|s|ms))+$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = object_of({"matchLabels": TEXTS}, "matchLabels")
ENDPOINT = {"port": {"type": "string"}, "path": {"type": "string"}, "interval": DURATION}
TLS = object_of(
    {
        "ca": object_of({"secret": object_of({"name": {"type": "string"}, "key": {"type": "string"}}, "key")}),
        "serverName": {"type": "string"},
    }
)
RULE = object_of(
    {
        **{name: {"type": "string"} for name in ("alert", "record", "expr")},
        "for": DURATION,
        "labels": TEXTS,
        "annotations": TEXTS,
    },
    "expr",
)
SPECS: dict[str, Any] = {
    "ServiceMonitor": object_of(
        {
            "selector": SELECTOR,
            "endpoints": {
                "type": "array",
                "items": object_of({**ENDPOINT, "scheme": {"enum": ["http", "https"]}, "tlsConfig": TLS}),
            },
        },
        "selector",
        "endpoints",
    ),
    "PodMonitor": object_of(
        {"selector": SELECTOR, "podMetricsEndpoints": {"type": "array", "items": object_of(ENDPOINT)}},
        "selector",
        "podMetricsEndpoints",
    ),
    "PrometheusRule": object_of(
        {
            "groups": {
                "type": "array",
                "items": object_of(
                    {
                        "name": {"type": "string"},
                        "interval": DURATION,
                        "rules": {"type": "array", "items": RULE},
                    },
                    "name",
                    "rules",
                ),
            }
        },
        "groups",
    ),
}
"""Schemas of our own, of the fields that the chart uses, by version v1 of
https://prometheus-operator.dev/docs/api-reference/api/."""


def monitoring(values: str) -> list[Object]:
    return [each for each in objects("", values) if each["kind"] in KINDS]


def dashboards(values: str) -> list[Object]:
    return [each for each in objects("", values) if "-dashboard-" in each["metadata"]["name"]]


def test_nothing_of_it_is_there_until_it_is_asked_for() -> None:
    assert monitoring("") == []
    assert dashboards("") == []


@pytest.mark.parametrize("values", [MONITORED, PLAIN])
def test_everyobject_of_is_one_that_the_operator_knows(values: str) -> None:
    found = monitoring(values)

    assert {each["kind"] for each in found} >= {"ServiceMonitor", "PrometheusRule"}
    for each in found:
        assert each["apiVersion"] == "monitoring.coreos.com/v1"
        jsonschema.Draft202012Validator(SPECS[each["kind"]]).validate(each["spec"])


def test_monitors_find_the_ports_on_which_gateways_and_the_autoscaler_tell_of_themselves() -> None:
    found = objects("", MONITORED)
    gateways, autoscalers = find(found, "ServiceMonitor")["spec"], find(found, "PodMonitor")["spec"]
    services = [
        each
        for each in found
        if each["kind"] == "Service"
        and each["metadata"]["labels"].items() >= gateways["selector"]["matchLabels"].items()
        and any(port["name"] == gateways["endpoints"][0]["port"] for port in each["spec"]["ports"])
    ]
    scraped = [pod for pod in pods(found) if pod.labels.items() >= autoscalers["selector"]["matchLabels"].items()]

    assert [each["metadata"]["name"] for each in services] == ["rel-penstock-admin"]
    assert [pod.owner for pod in scraped] == ["Deployment rel-penstock-autoscaler"]
    ports = {port["name"] for pod in scraped for port in pod.spec["containers"][0]["ports"]}
    assert autoscalers["podMetricsEndpoints"][0]["port"] in ports


def test_where_gateways_speak_tls_they_are_scraped_by_a_name_of_their_certificate() -> None:
    found = objects("", MONITORED)
    endpoint = find(found, "ServiceMonitor")["spec"]["endpoints"][0]

    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == f"rel-penstock-admin.{NAMESPACE}.svc"
    assert "ca.crt" in find(found, "Secret", endpoint["tlsConfig"]["ca"]["secret"]["name"])["data"]
    assert find(objects("", PLAIN), "ServiceMonitor")["spec"]["endpoints"][0]["scheme"] == "http"


def test_without_an_autoscaler_nothing_looks_for_one() -> None:
    assert [each["kind"] for each in monitoring(PLAIN)].count("PodMonitor") == 0


def test_the_rules_are_the_file_with_the_address_of_the_runbooks() -> None:
    rules = find(objects("", MONITORED), "PrometheusRule")["spec"]
    file = outputs.RULES.read_text(encoding="utf-8")

    assert rules == yaml.safe_load(file.replace("docs/alerts.md#", "https://docs.example.com/alerts#"))
    urls = [rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"] if "for" in rule]
    assert "https://docs.example.com/alerts#penstocknoreplica" in urls
    assert find(objects("", PLAIN), "PrometheusRule")["spec"] == yaml.safe_load(file)


def test_each_dashboard_is_a_configmap_that_the_sidecar_finds() -> None:
    found = {name: json.loads(text) for each in dashboards(MONITORED) for name, text in each["data"].items()}

    assert found == {
        f"penstock-{path.name}": json.loads(path.read_text(encoding="utf-8"))
        for path in outputs.DASHBOARDS.glob("*.json")
    }
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in dashboards(MONITORED)} == {"yes"}
    assert {each["metadata"]["annotations"]["grafana_folder"] for each in dashboards(MONITORED)} == {"Serving"}
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in dashboards(PLAIN)} == {"1"}
    assert not any("annotations" in each["metadata"] for each in dashboards(PLAIN))


def test_labels_that_an_operator_selects_by_stand_beside_the_charts_own() -> None:
    for each in monitoring(MONITORED):
        assert each["metadata"]["labels"]["release"] == "prometheus"
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "penstock"


@pytest.mark.parametrize(
    ("value", "kind"),
    [("serviceMonitor", "ServiceMonitor"), ("rules", "PrometheusRule")],
)
def test_a_cluster_without_the_operator_is_told_so(value: str, kind: str) -> None:
    done = template("", f"monitoring: {{{value}: {{enabled: true}}}}", ("ray.io/v1/RayService",))

    assert done.returncode != 0
    assert f"monitoring.{value}.enabled is true, but this cluster has no {kind}" in done.stderr
