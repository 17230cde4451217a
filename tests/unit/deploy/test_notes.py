"""What the notes say after an install, in each of their branches."""

import re

from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import find, notes, objects

KEEP = {"helm.sh/resource-policy": "keep"}
RAY_REDIS_STAYS = "{rayRedis: {enabled: true, persistence: {whenDeleted: Retain}}}"
BACKUPS_ONLY = "{backups: {enabled: true}, redis: {persistence: {enabled: false}}}"


def removed(text: str) -> list[str]:
    """What their command for the rest removes; empty where they say that nothing is left."""
    command = re.search(r"leaves the tenants' data: kubectl delete --namespace llm (.*)", text)
    assert (command is None) == ("helm uninstall leaves nothing" in text)
    return command[1].split() if command else []


def keeps_the_cluster_secret(values: str) -> bool:
    return bool(find(objects("", values), "Secret", "rel-penstock-cluster")["metadata"].get("annotations") == KEEP)


def test_the_cluster_secret_stays_wherever_the_tenants_stay() -> None:
    for values in ("", BRANCHES["outer redis, anybody"]):
        assert keeps_the_cluster_secret(values), values
        assert "secret/rel-penstock-cluster" in removed(notes(values)), values
    assert keeps_the_cluster_secret(BACKUPS_ONLY), "without it what a backup restores opens nothing"
    assert "secret/rel-penstock-cluster" in removed(notes(BACKUPS_ONLY))
    for values in (BRANCHES["no persistence"], BRANCHES["storage classes"]):
        assert not keeps_the_cluster_secret(values), values
        assert "secret/rel-penstock-cluster" not in removed(notes(values)), values


def test_whose_key_is_taken_is_the_first_tenants_or_the_one_that_is_named() -> None:
    """The Secret of a user has the keys that it has: of a tenant `default` only where somebody says so."""
    own, nobody = BRANCHES["outer redis"], "{secrets: {tenants: mine}}"
    for values, secret, tenant in (
        ("", "rel-penstock-tenants", "default"),
        (own, "own", "acme"),
        ("{test: {tenant: '7'}}", "rel-penstock-tenants", "7"),
    ):
        env = find(objects("", values), "Pod")["spec"]["containers"][0]["env"]
        assert env[-1] == {"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": secret, "key": tenant}}}
        assert (
            f'get secret {secret} --namespace llm --output go-template=\'{{{{index .data "{tenant}" | '
            f"base64decode}}}}'"
        ) in notes(values)

    assert not [each for each in objects("", nobody) if each["kind"] == "Pod"]
    assert find(objects("", nobody), "Job"), "its tenants are made known"
    for values in (nobody, BRANCHES["no autoscaler"]):
        assert "helm test" not in notes(values)
        assert "-- penstock key create acme" in notes(values)


def test_the_notes_name_all_that_an_uninstall_leaves() -> None:
    assert removed(notes()) == ["pvc/data-rel-penstock-redis-0", "secret/rel-penstock-cluster"]
    assert removed(notes(BRANCHES["no persistence"])) == []
    assert removed(notes(BRANCHES["storage classes"])) == ["pvc/rel-penstock-adapters", "pvc/rel-penstock-batches"]
    assert removed(notes(BRANCHES["outer redis, anybody"])) == ["secret/rel-penstock-cluster"]
    assert removed(notes(BACKUPS_ONLY)) == ["secret/rel-penstock-cluster", "pvc/rel-penstock-backups"]
    assert "pvc/rel-penstock-backups" not in removed(notes(BRANCHES["backups"])), "a claim of the user's own"
    assert "pvc/data-rel-penstock-ray-redis-0" in removed(notes(RAY_REDIS_STAYS))
    folder = RAY_REDIS_STAYS.replace("persistence: {", "persistence: {enabled: false, ")
    for values in ("{rayRedis: {enabled: true}}", folder):
        assert "pvc/data-rel-penstock-ray-redis-0" not in removed(notes(values))
    assert "stay in your Redis, in any case; without secret/rel-penstock-cluster" in notes(
        BRANCHES["outer redis, anybody"]
    )
    assert "leaves nothing here.\nTenants, keys and usage stay in your Redis, in any case." in notes(
        BRANCHES["outer redis"]
    )


def test_the_notes_name_the_ways_in_that_there_are() -> None:
    inside = "The API is at http://rel-penstock.llm.svc:80/v1 inside the cluster;\n"
    assert inside + "from here:\n" in notes(), "none else"
    assert inside + "from here:\n" in notes("ingress: {host: llm.example.com}"), "not enabled"
    assert (
        "outside at https://llm.example.com/v1;\nby the Gateway public at llm.example.com, path /v1;\nfrom here:"
        in notes(BRANCHES["ingress and route"])
    )
    assert (
        "outside at http://ADDRESS/v1, where kubectl get ingress rel-penstock --namespace llm has the address;"
        in notes(BRANCHES["plain ingress"])
    )
