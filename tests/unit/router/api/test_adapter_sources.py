"""Adapters by HTTPS and out of a folder through the running gateway, from servers on real sockets."""

import hashlib
from pathlib import Path

import pytest

from penstock.adapters.peft import FILES, WEIGHTS_FILE
from penstock.base.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.adapters.sources.servers import (
    adapter_files,
    below,
    files_at,
    response,
    tar_of,
    zip_of,
)
from tests.unit.router.api.adapter_fakes import FakeRemote, serving
from tests.unit.router.api.fetching_gateway import HOSTS, SECRET, ask, fetching, nothing_is_left


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    return Authority().issue(tmp_path / "tls", "files.test", "other.test", "cdn.test")


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
