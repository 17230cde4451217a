"""A whole platform with TLS on its streams and its gateway, and a user for each role in its Redis: timed replicas."""

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
import redis

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.base.redis_roles import make_password, url_of
from penstock.base.subsecrets import parse_replica_secrets
from penstock.base.tls import TlsContexts, TlsFiles
from penstock.cli.state import StateDir
from penstock.router.replicas.link import Greeting, connect
from penstock.wire.errors import ReplicaLost
from penstock.wire.stream_config import GATEWAY_NAME, REPLICA_NAME
from tests.certificates import Authority
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway:
  port: {{port}}
  tls: {{{{certificate: {http.certificate}, key: {http.key}, ca: {http.ca}}}}}
stream:
  tls: {{{{ca: {stream.ca}, certificate: {stream.certificate}, key: {stream.key}}}}}
pools:
- {{{{name: timed, served_names: [timed], replicas: 2, engine: {{{{runner: timed, timed: {{{{base_s: 0.002}}}}}}}}}}}}
"""
WITHIN_S = 30.0


class Encrypted(NamedTuple):
    platform: PlatformProcess
    http: TlsFiles
    stream: TlsFiles
    secret: bytes


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("encrypted")
    http = Authority("http").issue(folder / "http", "localhost")
    stream = Authority("stream").issue(folder / "stream", GATEWAY_NAME, REPLICA_NAME)
    with running_platform(folder, CONFIG.format(http=http, stream=stream)) as platform:
        yield Encrypted(platform, http, stream, StateDir(platform.state).secret())


def trusting(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    return context


def known_to(files: TlsFiles) -> ssl.SSLContext:
    """The same, with a certificate of that CA to show."""
    context = trusting(files)
    context.load_cert_chain(files.certificate, files.key)
    return context


def stream_of(encrypted: Encrypted) -> bytes:
    """The replicas' stream secret: on one machine they have one file."""
    run = StateDir(encrypted.platform.state).read()
    assert run is not None
    return parse_replica_secrets((Path(run.temp_dir) / "replica-secrets").read_text(encoding="ascii")).stream


def stream_port(platform: PlatformProcess) -> int:
    """A port on which a replica listens, other than Ray's: the one that speaks TLS."""
    for pid in platform.replicas:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and speaks_tls(connection.laddr.port):
                return int(connection.laddr.port)
    raise AssertionError("no replica listens")


def speaks_tls(port: int) -> bool:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2.0) as plain, bare.wrap_socket(plain):
            return True
    except OSError:
        return False


def is_connected(port: int) -> bool:
    return any(known.raddr and known.raddr.port == port for known in psutil.Process().net_connections("tcp"))


def test_an_answer_comes_by_https_and_none_by_http(encrypted: Encrypted) -> None:
    url = encrypted.platform.url.replace("127.0.0.1", "localhost")
    body = {"model": "timed", "prompt": "x", "max_tokens": 8}
    headers = {"Authorization": f"Bearer {encrypted.platform.key}"}
    with httpx.Client(verify=known_to(encrypted.http), trust_env=False, headers=headers, timeout=WITHIN_S) as client:
        answer = client.post(f"{url}/v1/completions", json=body)
        with pytest.raises(httpx.TransportError):
            client.post(f"{url.replace('https', 'http')}/v1/completions", json=body)

    assert url.startswith("https://")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_who_shows_no_certificate_of_the_ca_gets_no_answer_with_a_key_neither(encrypted: Encrypted) -> None:
    url = encrypted.platform.url.replace("127.0.0.1", "localhost")
    headers = {"Authorization": f"Bearer {encrypted.platform.key}"}
    with (
        httpx.Client(verify=trusting(encrypted.http), trust_env=False, headers=headers, timeout=WITHIN_S) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get(f"{url}/v1/models")


def test_the_platforms_own_commands_are_let_in(encrypted: Encrypted) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "status", "--json", "--state", str(encrypted.platform.state)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(found.stdout)["pools"][0]["replicas_ready"] == 2


def test_a_stream_without_tls_or_of_another_ca_is_refused_with_the_right_secret_too(
    encrypted: Encrypted, tmp_path: Path
) -> None:
    port = stream_port(encrypted.platform)
    address = f"127.0.0.1:{port}"
    greeting = Greeting("stranger", "unknown", stream_of(encrypted))
    stranger = Authority("another").issue(tmp_path / "stranger", GATEWAY_NAME)
    foreign = TlsFiles(certificate=stranger.certificate, key=stranger.key, ca=encrypted.stream.ca)

    async def reason(files: TlsFiles | None) -> str:
        tls = None if files is None else TlsContexts(files, is_server=False).newest
        with pytest.raises(ReplicaLost) as lost:
            async with connect(address, greeting, lambda _: None, lambda: None, tls):
                pass
        # the end of TLS takes turns of the event loop
        await asyncio.to_thread(wait_for, lambda: not is_connected(port), within_s=WITHIN_S)
        return lost.value.message

    assert "not the replica" in asyncio.run(reason(encrypted.stream)), "its certificate is accepted, its epoch is not"
    assert "not the replica" not in asyncio.run(reason(None))
    assert "not the replica" not in asyncio.run(reason(foreign))


def test_replicas_write_their_index_as_a_user_that_can_read_no_tenant(encrypted: Encrypted) -> None:
    url = encrypted.platform.redis_url
    with redis.Redis.from_url(url) as operator:
        # a scan may name a key twice
        wait_for(lambda: len(set(operator.scan_iter("penstock:prefix:*:meta"))) == 2, within_s=WITHIN_S)
        [key] = set(operator.scan_iter("penstock:key:*"))
    with redis.Redis.from_url(url_of(url, "replica", make_password(encrypted.secret, "replica"))) as replica:
        with pytest.raises(redis.exceptions.NoPermissionError):
            replica.get(key)
        with pytest.raises(redis.exceptions.NoPermissionError):
            replica.set("penstock:key:{mine}", b'{"tenant":"demo"}')
