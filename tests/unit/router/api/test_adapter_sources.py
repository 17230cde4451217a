"""Adapters by HTTPS, S3 and hub id through the running gateway, from servers on real sockets; and what hostile ones
do."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.adapters.config import HubSource, S3Source, SourcesConfig
from penstock.adapters.peft import CONFIG_FILE, FILES, WEIGHTS_FILE
from penstock.adapters.sources.bring import SourceSecrets
from penstock.adapters.sources.signature import S3Key
from penstock.base.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.adapters.sources.servers import (
    Handler,
    Names,
    ReceivedRequest,
    Server,
    adapter_files,
    below,
    files_at,
    response,
    serve,
    tar_of,
    zip_of,
)
from tests.unit.router.api.adapter_fakes import Adapters, FakeRemote, serving
from tests.unit.router.http_fakes import KEY

SECRET = "a-secret-in-the-query"
KEY_OF_STORE = S3Key("AKIAEXAMPLE", "the/secret+of/the=store")
TOKEN = "hf_a-secret-token"
HOSTS = Names(
    files_test="127.0.0.1",
    other_test="127.0.0.1",
    cdn_test="127.0.0.1",
    inside_test="10.0.0.1",
    metadata_test="169.254.169.254",
    both_test="8.8.8.8 127.0.0.1",
)


async def ask(adapters: Adapters, source: str, **more: Any) -> httpx.Response:
    return await adapters.world.client.post("/v1/adapters", json={"name": "mine", "source": source, **more})


def nothing_is_left(adapters: Adapters, tmp_path: Path) -> bool:
    folders = [place for place in (tmp_path / "store").iterdir() if place.is_dir()]
    return not adapters.registry.records and not folders and not adapters.remotes[0].resident


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    return Authority().issue(tmp_path / "tls", "files.test", "other.test", "cdn.test")


@asynccontextmanager
async def fetching(
    tmp_path: Path,
    handle: Handler,
    tls: TlsFiles | None,
    secrets: SourceSecrets | None = None,
    names: Names = HOSTS,
    max_bytes: int = 2**20,
    make: Callable[[Server], dict[str, Any]] = lambda server: {"https": "public"},
) -> AsyncIterator[tuple[Adapters, Server]]:
    """A gateway, and a server that its operator has listed as files.test. make: further settings of the sources."""
    async with serve(handle, tls) as server:
        settings: dict[str, Any] = {
            "hosts": (f"files.test:{server.port}",),
            "ca_file": None if tls is None else tls.ca,
            "stall_s": 5.0,
        }
        sources = SourcesConfig(**settings | make(server))
        async with serving(
            tmp_path,
            FakeRemote(),
            secrets=secrets or SourceSecrets(),
            resolve=names,
            sources=sources,
            max_bytes=max_bytes,
        ) as adapters:
            yield adapters, server


# what works


async def test_a_folder_by_https_is_an_adapter_like_an_uploaded_one(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a")
    async with fetching(tmp_path, files_at(below("/some/adapter", files)), tls) as (adapters, server):
        created = await ask(adapters, f"https://files.test:{server.port}/some/adapter/")
        uploaded = await adapters.upload("uploaded")

        assert (created.status_code, created.json()["state"], created.json()["rank"]) == (201, "loaded", 2)
        assert created.json()["digest"] == uploaded.json()["digest"]
        place = adapters.store.path(created.json()["digest"])
        assert {file.name: file.read_bytes() for file in place.iterdir()} == files
        assert (await adapters.world.chat(model="mine")).status_code == 200
        assert server.targets == [f"/some/adapter/{name}" for name in FILES]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz"])
async def test_an_archive_by_https_leaves_the_two_files_alone(name: str, tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a")
    made = zip_of(files) if name == "a.zip" else tar_of(files, "w" if name == "a.tar" else "w:gz")
    digest = f"sha256:{hashlib.sha256(made).hexdigest().upper()}"
    async with fetching(tmp_path, files_at({f"/{name}?token={SECRET}": made}), tls) as (adapters, server):
        created = await ask(adapters, f"https://files.test:{server.port}/{name}?token={SECRET}", digest=digest)

        assert created.status_code == 201, created.text
        place = adapters.store.path(created.json()["digest"])
        assert {file.name: file.read_bytes() for file in place.iterdir()} == files


async def test_http_is_for_listed_hosts(tmp_path: Path) -> None:
    async with fetching(tmp_path, files_at(below("/a", adapter_files(tmp_path / "a"))), None) as (adapters, server):
        assert (await ask(adapters, f"http://files.test:{server.port}/a")).status_code == 201
        refused = await ask(adapters, f"http://other.test:{server.port}/a")

        assert refused.status_code == 400
        assert "would be asked by http" in refused.text


async def test_a_digest_is_of_the_weights_or_of_the_adapter(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a")
    weights = f"sha256:{hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()}"
    async with fetching(tmp_path, files_at(below("/a", files)), tls) as (adapters, server):
        url = f"https://files.test:{server.port}/a"
        wrong = [await ask(adapters, url, digest=digest) for digest in ("sha256:" + "0" * 64, "0" * 32)]
        malformed = await ask(adapters, url, digest="md5:0")
        assert nothing_is_left(adapters, tmp_path)
        by_weights = await ask(adapters, url, digest=weights)
        by_both = await ask(adapters, url, digest=by_weights.json()["digest"])

        assert [response.status_code for response in (*wrong, malformed, by_weights, by_both)] == [400] * 3 + [201] * 2
        assert [response.json()["error"]["param"] for response in (*wrong, malformed)] == ["digest"] * 3
        assert f"The digest of {WEIGHTS_FILE} is {weights}, not sha256:0" in wrong[0].text


async def test_redirects_are_followed_as_far_as_they_lead_to_what_may_be_asked(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a")
    pages = below("/there", files)
    for name in FILES:
        pages[f"/here/{name}"] = response(status=302, location=f"/then/{name}?x={SECRET}")
        pages[f"/then/{name}?x={SECRET}"] = response(status=307, location=f"../there/{name}")
    async with fetching(tmp_path, files_at(pages), tls) as (adapters, server):
        assert (await ask(adapters, f"https://files.test:{server.port}/here")).status_code == 201
        assert len(server.asked) == 6


# S3


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


# a hub


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


# what is off, or not allowed


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("https://files.test/a", "takes no adapters from URLs"),
        ("s3://bucket/a", "takes no adapters from S3"),
        ("hub:owner/name", "takes no adapters from a hub"),
        ("folder:a", "has no import folder"),
        ("ftp://files.test/a", "begins with https://"),
    ],
)
async def test_every_source_is_off_until_it_is_switched_on(source: str, sentence: str, tmp_path: Path) -> None:
    async with serving(tmp_path, FakeRemote(), resolve=HOSTS) as adapters:
        refused = await ask(adapters, source)

        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "source")
        assert sentence in refused.text
        assert nothing_is_left(adapters, tmp_path)


async def test_a_folder_is_the_tenants_own(tmp_path: Path) -> None:
    adapter_files(tmp_path / "imports" / "tenant-1" / "good")
    adapter_files(tmp_path / "imports" / "tenant-2" / "theirs")
    async with serving(tmp_path, FakeRemote(), import_folder=str(tmp_path / "imports"), max_bytes=2**20) as adapters:
        assert (await ask(adapters, "folder:good")).status_code == 201
        assert (await ask(adapters, "folder:../tenant-2/theirs")).status_code == 400


TARGETS = [
    ("https://127.0.0.1/", "has no address on the public internet"),
    ("https://[::1]/", "has no address on the public internet"),
    ("https://[::ffff:169.254.169.254]/", "has no address on the public internet"),
    ("https://2130706433/", "has no address on the public internet"),
    ("https://0x7f000001/", "has no address on the public internet"),
    ("https://0/", "has no address on the public internet"),
    ("https://169.254.169.254/latest/meta-data", "has no address on the public internet"),
    ("https://metadata.test/latest", "has no address on the public internet"),
    ("https://inside.test/", "has no address on the public internet"),
    ("https://both.test/", "has no address on the public internet"),
    ("https://other.test/", "has no address on the public internet"),
    ("https://other.test:6379/", "is not at port 443"),
    ("https://user:open-sesame@other.test/", "has a user or a password"),
]


@pytest.mark.parametrize(("target", "sentence"), TARGETS)
async def test_what_is_not_public_is_refused_directly_and_behind_a_redirect(
    target: str, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=302, location=target))

    async with fetching(tmp_path, handle, tls) as (adapters, server):
        refused = [await ask(adapters, source) for source in (target, f"https://files.test:{server.port}/a")]

        assert [response.status_code for response in refused] == [400, 400]
        assert all(sentence in response.text and "sesame" not in response.text for response in refused)
        assert nothing_is_left(adapters, tmp_path)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("http://{host}/a/b", "redirects from https to something else"),
        ("http://169.254.169.254/latest", "redirects from https to something else"),
        ("ftp://{host}/a", "redirects from https to something else"),
        ("file:///etc/passwd", "redirects from https to something else"),
        ("https://[::1", "redirects to what is no address"),
        ("https://{host}/again", "redirects more than 5 times"),
    ],
)
async def test_a_redirect_leads_neither_to_less_than_https_nor_round_and_round(
    target: str, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=301, location=target.format(host=asked.headers["host"])))

    async with fetching(tmp_path, handle, tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert refused.status_code in (400, 502)
        assert sentence in refused.text
        assert len(server.asked) <= 6
        assert nothing_is_left(adapters, tmp_path)


async def test_a_name_is_looked_up_once_and_what_it_meant_then_counts(tmp_path: Path, tls: TlsFiles) -> None:
    names = Names(files_test="127.0.0.1", turns_test=[["::ffff:10.0.0.1"], ["8.8.8.8"]])

    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=302, location="https://turns.test/a"))

    async with fetching(tmp_path, handle, tls, names=names) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, "has no address on the public internet" in refused.text) == (400, True)
        assert names.looked_up.count("turns.test") == 1


async def test_with_listed_hosts_alone_no_other_is_looked_up(tmp_path: Path, tls: TlsFiles) -> None:
    names = Names(files_test="127.0.0.1")
    async with fetching(tmp_path, files_at({}), tls, names=names, make=lambda _: {"https": "listed"}) as (adapters, _):
        refused = await ask(adapters, "https://8.8.8.8/a")

        assert (refused.status_code, "is not among the hosts" in refused.text, names.looked_up) == (400, True, [])


# what servers do wrong


def endless(head: bytes) -> Handler:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(bytes(2**16))
            await writer.drain()

    return handle


async def silent(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nx")
    await writer.drain()
    await asyncio.Event().wait()


async def dripping(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def says(data: bytes) -> Handler:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handle


@pytest.mark.parametrize(
    ("handle", "status", "sentence"),
    [
        (endless(b"HTTP/1.1 200 X\r\n\r\n"), 400, "is larger than"),
        (endless(b"HTTP/1.1 200 X\r\nx-endless: "), 502, "no HTTP"),
        (says(response(b"{}", length=2**40)), 400, "is larger than"),
        (says(response(b"{}", length=100)), 502, "broke off"),
        (says(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"), 502, "broke off"),
        (says(response(b"{}", content_encoding="gzip")), 502, "sends adapter_config.json encoded (gzip)"),
        (says(response(b"{}", content_encoding="identity, br")), 502, "encoded"),
        (says(response(b"<html>welcome</html>")), 400, "is not a JSON object"),
        (says(response(status=404)), 400, "has no adapter_config.json there (HTTP 404)"),
        (says(response(status=403)), 400, "does not give adapter_config.json away (HTTP 403)"),
        (says(response(status=206)), 502, "answered with HTTP 206"),
        (says(response(status=500)), 502, "answered with HTTP 500"),
        (says(response(status=429)), 502, "answered with HTTP 429"),
        (says(response(status=302)), 400, "redirects more than 5 times"),
        (says(b"SSH-2.0-OpenSSH\r\n"), 502, "no HTTP"),
        (says(b""), 502, "broke off"),
        (silent, 502, "it stopped sending"),
    ],
)  # fmt: skip
async def test_whatever_a_server_does_ends_in_a_sentence_and_leaves_nothing(
    handle: Handler, status: int, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    async with fetching(tmp_path, handle, tls, make=lambda _: {"https": "public", "stall_s": 0.3}) as (
        adapters,
        server,
    ):
        failed = await ask(adapters, f"https://files.test:{server.port}/a?token={SECRET}")

        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (status, "source_failed" if status == 502 else None)
        assert sentence in error["message"]
        assert SECRET not in failed.text
        assert nothing_is_left(adapters, tmp_path)


async def test_a_slow_drip_ends_with_the_time_of_the_download(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, dripping, tls, make=lambda _: {"https": "public", "timeout_s": 0.3}) as (
        adapters,
        server,
    ):
        failed = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (failed.status_code, "did not deliver within 0.3 seconds" in failed.text) == (502, True)
        assert nothing_is_left(adapters, tmp_path)


async def test_a_server_that_is_not_there_or_speaks_no_tls_is_said_so(tmp_path: Path) -> None:
    async with fetching(tmp_path, files_at({}), None, make=lambda _: {"https": "listed", "stall_s": 0.5}) as (
        adapters,
        server,
    ):
        plain = await ask(adapters, f"https://files.test:{server.port}/a")
    async with fetching(
        tmp_path, files_at({}), None, make=lambda _: {"hosts": ("files.test:1",), "https": "listed"}
    ) as (
        adapters,
        _,
    ):
        absent = await ask(adapters, "http://files.test:1/a")

    assert [response.status_code for response in (plain, absent)] == [502, 502]
    assert "no connection came about" in absent.text


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        ({WEIGHTS_FILE: b"<html></html>"}, "is not a safetensors file"),
        ({WEIGHTS_FILE: b"\x80\x02pickle"}, "is not a safetensors file"),
        ({WEIGHTS_FILE: bytes(2**20)}, "is larger than"),
        ({CONFIG_FILE: b"[]"}, "is not a JSON object"),
        ({CONFIG_FILE: b'{"peft_type": "IA3"}'}, "only LORA is supported"),
        ({CONFIG_FILE: b" " * (2**20 + 1)}, "is larger than"),
    ],
)
async def test_files_are_checked_as_uploaded_ones_are(
    pages: dict[str, bytes], sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    files = adapter_files(tmp_path / "a") | pages
    async with fetching(tmp_path, files_at(below("/a", files)), tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, sentence in refused.text) == (400, True), refused.text
        assert nothing_is_left(adapters, tmp_path)


async def test_a_cut_file_is_refused_and_leaves_the_adapter_as_it_was(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a", fill=1)
    files[WEIGHTS_FILE] = files[WEIGHTS_FILE][:-1]
    async with fetching(tmp_path, files_at(below("/a", files)), tls) as (adapters, server):
        before = (await adapters.upload()).json()

        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, "is not a safetensors file" in refused.text) == (400, True)
        assert (await adapters.get("/v1/adapters/mine")).json() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda files: tar_of(files | {"padding": bytes(2**24)}),
        lambda files: zip_of({CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes(2**24)}),
        lambda files: tar_of(files | {"../../escape": b"x"}),
        lambda files: tar_of(files)[:-50],
    ],
    ids=["gzip bomb", "zip bomb", "a way out", "cut short"],
)
async def test_a_hostile_archive_leaves_nothing(
    make: Callable[[dict[str, bytes]], bytes], tmp_path: Path, tls: TlsFiles
) -> None:
    made = make(adapter_files(tmp_path / "a"))
    async with fetching(tmp_path, files_at({"/a.zip": made}), tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a.zip")

        assert (refused.status_code, "archive" in refused.text) == (400, True), refused.text
        assert nothing_is_left(adapters, tmp_path)
        assert "escape" not in {name for _, _, names in os.walk(tmp_path) for name in names}


# bounds, and who watches


async def test_a_client_that_hangs_up_ends_the_download(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, silent, tls) as (adapters, server):
        url = f"https://files.test:{server.port}/a"
        body = httpx.Request("POST", "http://gateway", json={"name": "mine", "source": url}).content
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            message = next(messages, None)
            if message is not None:
                return message
            await server.was_asked.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            raise AssertionError("there is nobody to be answered")

        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        await adapters.world.app(
            {"type": "http", "method": "POST", "path": "/v1/adapters", "headers": headers}, receive, send
        )

        async with asyncio.timeout(5):
            await server.client_left.wait()
        assert nothing_is_left(adapters, tmp_path)


async def test_nothing_is_fetched_for_a_name_that_can_not_be(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, files_at({}), tls) as (adapters, server):
        url = f"https://files.test:{server.port}/a"
        refused = [await ask(adapters, url, **more) for more in ({"name": "a/b"}, {"base_model": "unknown"})]

        assert [response.status_code for response in refused] == [400, 400]
        assert server.asked == []


async def test_no_secret_of_a_source_is_in_a_log_or_an_answer(
    tmp_path: Path, tls: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "penstock")
    files = adapter_files(tmp_path / "a")
    query = f"?token={SECRET}"
    pages = {f"/a/{name}{query}": content for name, content in files.items()}
    pages |= {f"/moved/{name}{query}": response(status=302, location=f"/a/{name}{query}") for name in FILES}
    pages |= {f"/broken/{CONFIG_FILE}{query}": response(b"{}", length=50)}
    async with fetching(tmp_path, files_at(pages), tls) as (adapters, server):
        sources = [f"https://files.test:{server.port}/{path}{query}" for path in ("a", "moved", "broken", "absent")]
        answers = [await ask(adapters, source) for source in sources]

        assert [answer.status_code for answer in answers] == [201, 201, 502, 400]
        written = "\n".join(
            f"{record.getMessage()} {vars(record)}" for record in caplog.records if record.name != "asyncio"
        )
        assert "adapter registered" in written
        assert SECRET not in written
        assert SECRET not in "".join(answer.text for answer in answers)
        assert SECRET not in repr(adapters.registry.records)
