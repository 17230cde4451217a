"""Adapters out of S3 stores and hubs through the running gateway, from servers on real sockets."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.config import HubSource, S3Source
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.sources.bring import SourceSecrets
from penstock.adapters.sources.signature import S3Key
from penstock.base.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.adapters.sources.servers import (
    Handler,
    ReceivedRequest,
    Server,
    adapter_files,
    below,
    files_at,
    response,
    serve,
    tar_of,
)
from tests.unit.router.api.fetching_gateway import KEY_OF_STORE, SECRET, TOKEN, ask, fetching, nothing_is_left


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    return Authority().issue(tmp_path / "tls", "files.test", "other.test", "cdn.test")


def is_signed(asked: ReceivedRequest, key: S3Key) -> bool:
    """Signature Version 4, as the S3 API Reference has it, of what arrived: by the lines of the request, without
    anything of the code under test."""
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8}/[^/]+/s3/aws4_request), ?SignedHeaders=([^,]+), ?Signature=(\w+)",
        asked.headers.get("authorization", ""),
    )
    if found is None or found[1] != key.access_key:
        return False
    path, _, query = asked.target.partition("?")
    names = found[3].split(";")
    assert {"host", "x-amz-content-sha256", "x-amz-date"} <= set(names)
    canonical = "GET\n" + path + "\n" + query + "\n"
    canonical += "".join(f"{name}:{asked.headers[name].strip()}\n" for name in names)
    canonical += "\n" + found[3] + "\n" + asked.headers["x-amz-content-sha256"]
    text = "\n".join(
        ["AWS4-HMAC-SHA256", asked.headers["x-amz-date"], found[2], hashlib.sha256(canonical.encode()).hexdigest()]
    )
    day, region, service, end = found[2].split("/")

    def mac(with_key: bytes, word: str) -> bytes:
        return hmac.digest(with_key, word.encode(), "sha256")

    signing = mac(mac(mac(mac(b"AWS4" + key.secret_key.encode(), day), region), service), end)
    return hmac.compare_digest(hmac.new(signing, text.encode(), "sha256").hexdigest(), found[4])


def store_of(pages: Mapping[str, bytes], key: S3Key | None) -> Handler:
    """A store in path style that gives nothing away without a valid signature; None: to anybody."""

    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        if key is not None and not is_signed(asked, key):
            writer.write(response(b"<Error><Code>SignatureDoesNotMatch</Code></Error>", 403))
        elif key is None and "authorization" in asked.headers:
            writer.write(response(status=400))
        else:
            await files_at(pages)(asked, writer)

    return handle


def s3_at(server: Server, scheme: str = "https", **more: Any) -> dict[str, Any]:
    return {"s3": S3Source(endpoint=f"{scheme}://files.test:{server.port}", region="eu-west-7", **more), "hosts": ()}


@pytest.mark.parametrize("token", [None, "a/session+token=="])
async def test_a_store_is_asked_with_a_signature_that_holds(token: str | None, tmp_path: Path, tls: TlsFiles) -> None:
    key = KEY_OF_STORE._replace(session_token=token)
    pages = below("/models/mine/a%20b/c%2Bd%28%C3%A9%29~", adapter_files(tmp_path / "a"))
    named = {"access_key_env": "A", "secret_key_env": "B", "allow": ("models/mine",)}
    async with fetching(
        tmp_path, store_of(pages, key), tls, SourceSecrets(s3_key=key), make=lambda server: s3_at(server, **named)
    ) as (adapters, server):
        created = await ask(adapters, "s3://models/mine/a b/c+d(é)~/")

        assert created.status_code == 201, created.text
        assert {asked.headers.get("x-amz-security-token") for asked in server.asked} == {token}


async def test_a_wrong_secret_is_noticed_and_not_shown(tmp_path: Path, tls: TlsFiles) -> None:
    wrong = KEY_OF_STORE._replace(secret_key="another")
    pages = below("/models/a", adapter_files(tmp_path / "a"))
    named = {"access_key_env": "A", "secret_key_env": "B", "allow": ("models",)}
    async with fetching(
        tmp_path,
        store_of(pages, KEY_OF_STORE),
        tls,
        SourceSecrets(s3_key=wrong),
        make=lambda server: s3_at(server, **named),
    ) as (adapters, _):
        refused = await ask(adapters, "s3://models/a")

        assert (refused.status_code, "HTTP 403" in refused.text, "another" in refused.text) == (400, True, False)
        assert nothing_is_left(adapters, tmp_path)


async def test_without_credentials_a_store_is_asked_anonymously_by_http_too(tmp_path: Path) -> None:
    pages = {"/models/a.tar.gz": tar_of(adapter_files(tmp_path / "a"))}
    async with fetching(tmp_path, store_of(pages, None), None, make=lambda server: s3_at(server, "http")) as (
        adapters,
        _,
    ):
        assert (await ask(adapters, "s3://models/a.tar.gz")).status_code == 201
        assert (await ask(adapters, "s3://models/b")).status_code == 400


async def test_a_tenant_takes_from_a_store_what_it_may_and_nothing_else(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a")
    pages = below("/models/tenants/tenant-1/a", files) | below("/models/tenants/tenant-2/a", files)
    named = {"access_key_env": "A", "secret_key_env": "B", "allow": ("models/tenants/{tenant}",)}
    async with fetching(
        tmp_path,
        store_of(pages, KEY_OF_STORE),
        tls,
        SourceSecrets(s3_key=KEY_OF_STORE),
        make=lambda server: s3_at(server, **named),
    ) as (adapters, server):
        foreign = [
            await ask(adapters, f"s3://models/{path}") for path in ("tenants/tenant-2/a", "tenants/tenant-10/a", "a")
        ]
        assert [response.status_code for response in foreign] == [403] * 3
        assert server.asked == []
        assert (await ask(adapters, "s3://models/tenants/tenant-1/a")).status_code == 201
        assert (await ask(adapters, f"https://files.test:{server.port}/models/tenants/tenant-2/a")).status_code == 400


async def test_a_store_that_redirects_is_not_followed(tmp_path: Path, tls: TlsFiles) -> None:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=301, location="https://other.test/"))

    named = {"access_key_env": "A", "secret_key_env": "B", "allow": ("models",)}
    async with fetching(
        tmp_path, handle, tls, SourceSecrets(s3_key=KEY_OF_STORE), make=lambda server: s3_at(server, **named)
    ) as (adapters, server):
        refused = await ask(adapters, "s3://models/a")

        assert (refused.status_code, "which is not followed" in refused.text) == (400, True)
        assert len(server.asked) == 1


def hub_of(files: Mapping[str, bytes], cdn: str, paths: str = "/owner/name/resolve/main") -> Handler:
    """A hub that gives a repository to those who show the token, and has its large files elsewhere."""

    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        path, _, name = asked.target.rpartition("/")
        if asked.headers.get("authorization") != f"Bearer {TOKEN}" or path != paths or name not in files:
            writer.write(response(status=401))
        elif name == CONFIG_FILE:
            writer.write(response(files[name]))
        else:
            writer.write(response(status=302, location=f"{cdn}/blob/{name}?Signature={SECRET}"))

    return handle


@pytest.mark.parametrize(
    ("source", "revision"), [("hub:owner/name", "main"), ("hub:owner/name@team/one", "team%2Fone")]
)
async def test_a_hub_gives_files_by_its_cdn_which_never_sees_the_token(
    source: str, revision: str, tmp_path: Path, tls: TlsFiles
) -> None:
    files = adapter_files(tmp_path / "a")
    blobs = {f"/blob/{name}?Signature={SECRET}": content for name, content in files.items()}
    async with serve(files_at(blobs), tls) as cdn:
        url = f"https://cdn.test:{cdn.port}"
        async with fetching(
            tmp_path,
            hub_of(files, url, f"/owner/name/resolve/{revision}"),
            tls,
            SourceSecrets(hub_token=TOKEN),
            make=lambda server: {
                "hub": HubSource(endpoint=f"https://files.test:{server.port}", token_env="T", allow=("owner",)),
                "hosts": (f"cdn.test:{cdn.port}",),
            },
        ) as (adapters, hub):
            created = await ask(adapters, source)
            foreign = await ask(adapters, "hub:another/name")

            assert created.status_code == 201, created.text
            assert foreign.status_code == 403
            assert len(hub.asked) == 2
            assert [sorted(asked.headers) for asked in cdn.asked] == [
                ["accept", "accept-encoding", "host", "user-agent"]
            ]


async def test_a_token_does_not_come_back_with_a_redirect(tmp_path: Path, tls: TlsFiles) -> None:
    """Else whoever stands behind a redirect could have any file of the hub read with it."""
    files = adapter_files(tmp_path / "a")
    there = ""

    async def bounce(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=302, location=f"{there}/secret/name/resolve/main/{WEIGHTS_FILE}"))

    async with (
        serve(bounce, tls) as cdn,
        fetching(
            tmp_path,
            hub_of(files, f"https://cdn.test:{cdn.port}"),
            tls,
            SourceSecrets(hub_token=TOKEN),
            make=lambda server: {
                "hub": HubSource(endpoint=f"https://files.test:{server.port}", token_env="T", allow=("owner",)),
                "hosts": (f"cdn.test:{cdn.port}",),
            },
        ) as (adapters, hub),
    ):
        there = f"https://files.test:{hub.port}"
        refused = await ask(adapters, "hub:owner/name")

        assert refused.status_code == 400
        assert [("authorization" in asked.headers, asked.target) for asked in hub.asked][-1] == (
            False,
            f"/secret/name/resolve/main/{WEIGHTS_FILE}",
        )
