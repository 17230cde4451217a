"""Redis as the chart starts it: its script, run."""

import base64
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from deploy import chart_redis_roles
from penstock.base.environment import REDIS_URL
from penstock.base.redis_roles import ROLES, acl_line
from penstock.base.redis_server import find_executable
from tests.unit.deploy.branches import BRANCHES
from tests.unit.deploy.charts import CHART, Pod, containers, find, objects, pods, template

START_S = 20.0
CONF = "port 0\nunixsocket {folder}/s\nsave ''\ninclude {folder}/auth.conf\n"


def started(folder: Path, password: str, users: str | None = None) -> subprocess.Popen[bytes]:
    """start.sh with its files in the folder, and nothing but what a small image has on its path."""
    script = find(objects(), "ConfigMap", "rel-penstock-redis")["data"]["start.sh"]
    (folder / "start.sh").write_text(
        script.replace("/run/redis/", f"{folder}/")
        .replace("/etc/redis/", f"{folder}/")
        .replace("/etc/redis-users/", f"{folder}/"),
        encoding="utf-8",
    )
    if users is not None:
        (folder / "users.conf").write_text(users, encoding="ascii")
    (folder / "redis.conf").write_text(CONF.format(folder=folder), encoding="utf-8")
    (folder / "redis-server").symlink_to(find_executable())
    environment = {"PATH": f"{folder}:{os.defpath}", "REDISCLI_AUTH": password}
    return subprocess.Popen(
        ["sh", str(folder / "start.sh")], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def await_socket(server: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until it takes connections, which is after its socket has a name."""
    deadline_s = time.monotonic() + START_S
    with socket.socket(socket.AF_UNIX) as tried:
        while tried.connect_ex(str(folder / "s")) and time.monotonic() < deadline_s:
            assert server.poll() is None, "it refused its configuration"
            time.sleep(0.01)


@pytest.mark.parametrize("password", ["plain", """a"b'c\\d $(e) `f` #g %s \\x41\\"""])
def test_redis_asks_for_exactly_the_password_of_the_secret(password: str, socket_dir: Path) -> None:
    server = started(socket_dir, password)
    try:
        await_socket(server, socket_dir)

        assert redis.Redis(unix_socket_path=str(socket_dir / "s"), password=password).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(socket_dir / "s")).ping()
    finally:
        server.kill()
        server.wait()


def test_redis_does_not_start_without_a_password(socket_dir: Path) -> None:
    server = started(socket_dir, "")

    assert server.wait(timeout=START_S) != 0


def secret() -> dict[str, str]:
    data = find(objects(), "Secret", "rel-penstock-redis")["data"]
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def test_redis_has_a_user_for_each_role_whose_address_is_in_the_secret(socket_dir: Path) -> None:
    found = secret()
    server = started(socket_dir, found["password"], found["users.conf"])
    try:
        await_socket(server, socket_dir)
        for role in ROLES:
            parts = urlsplit(found[f"{role}-url"])
            client = redis.Redis(
                unix_socket_path=str(socket_dir / "s"), username=parts.username, password=parts.password
            )
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()
            assert found["users.conf"].count(acl_line(role, parts.password or "")) == 1
            client.close()
    finally:
        server.kill()
        server.wait()


def test_every_pod_has_the_address_of_its_role_only() -> None:
    wanted = {
        "head": {"autoscaler-url"},
        "gateway": {"gateway-url", "operator-url"},
        "pool": {"replica-url"},
        "autoscaler": {"autoscaler-url"},
        "tenants": {"operator-url"},
    }
    for values, keys in (("", wanted), ("{secrets: {redis: mine}, redis: {roles: true}}", wanted)):
        assert addresses(values) == keys
    assert addresses("{secrets: {redis: mine}}") == {component: {"url"} for component in wanted}


def addresses(values: str) -> dict[str, set[str]]:
    """Keys of the Redis Secret that serve as addresses, by component."""
    found: dict[str, set[str]] = {}
    for pod in pods(objects("", values)):
        for container in containers(pod):
            keys = {
                variable["valueFrom"]["secretKeyRef"]["key"]
                for variable in container.get("env", [])
                if variable["name"].startswith("PENSTOCK_REDIS_URL")
            }
            if keys:
                found.setdefault(pod.labels["app.kubernetes.io/component"], set()).update(keys)
    return found


def test_a_changed_table_of_roles_starts_redis_anew(tmp_path: Path) -> None:
    """Redis reads its users when it starts; without the new rules a new version's gateways would be refused."""
    chart = Path(shutil.copytree(CHART, tmp_path / "penstock"))
    roles = chart / "templates" / "_redis_roles.tpl"
    roles.write_text(roles.read_text(encoding="utf-8").replace("+getdel", "+getdel +getex"), encoding="utf-8")
    before, after = (
        find(template("", chart=each).objects, "StatefulSet", "rel-penstock-redis")["spec"]["template"]
        for each in (CHART, chart)
    )

    assert before != after
    assert before == find(objects(), "StatefulSet", "rel-penstock-redis")["spec"]["template"], "passwords don't count"


def test_the_template_of_roles_is_the_generated_one() -> None:
    assert chart_redis_roles.TARGET.read_text(encoding="utf-8") == chart_redis_roles.render(), (
        "python -m deploy.chart_redis_roles"
    )


def test_every_pod_that_speaks_to_redis_has_the_files_of_its_tls() -> None:
    found = list(pods(objects("", BRANCHES["outer redis"])))
    speaking = {pod.owner for pod in found if speaks(pod)}
    holding = {
        pod.owner
        for pod in found
        for mount in pod.spec["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/etc/penstock/tls/redis"
        and {"name": "tls-redis", "secret": {"secretName": "redis-ca", "defaultMode": 0o440}} in pod.spec["volumes"]
    }

    assert speaking == holding
    assert len(speaking) == 6


def speaks(pod: Pod) -> bool:
    return any(variable["name"] == REDIS_URL for variable in pod.spec["containers"][0].get("env", []))
