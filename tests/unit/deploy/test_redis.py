"""Redis as the chart starts it: its script, run."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import redis

from penstock.base.redis_server import find_executable
from tests.unit.deploy.charts import find, objects

START_S = 20.0
CONF = "port 0\nunixsocket {folder}/s\nsave ''\ninclude {folder}/auth.conf\n"


def started(folder: Path, password: str) -> subprocess.Popen[bytes]:
    """start.sh with its files in the folder, and nothing but what a small image has on its path."""
    script = find(objects(), "ConfigMap", "rel-penstock-redis")["data"]["start.sh"]
    (folder / "start.sh").write_text(
        script.replace("/run/redis/", f"{folder}/").replace("/etc/redis/", f"{folder}/"), encoding="utf-8"
    )
    (folder / "redis.conf").write_text(CONF.format(folder=folder), encoding="utf-8")
    (folder / "redis-server").symlink_to(find_executable())
    environment = {"PATH": f"{folder}:{os.defpath}", "REDISCLI_AUTH": password}
    return subprocess.Popen(
        ["sh", str(folder / "start.sh")], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.parametrize("password", ["plain", """a"b'c\\d $(e) `f` #g %s \\x41\\"""])
def test_redis_asks_for_exactly_the_password_of_the_secret(password: str, socket_dir: Path) -> None:
    server = started(socket_dir, password)
    try:
        deadline_s = time.monotonic() + START_S
        while not (socket_dir / "s").exists() and time.monotonic() < deadline_s:
            assert server.poll() is None, "it refused its configuration"
            time.sleep(0.01)

        assert redis.Redis(unix_socket_path=str(socket_dir / "s"), password=password).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(socket_dir / "s")).ping()
    finally:
        server.kill()
        server.wait()


def test_redis_does_not_start_without_a_password(socket_dir: Path) -> None:
    server = started(socket_dir, "")

    assert server.wait(timeout=START_S) != 0
