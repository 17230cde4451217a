import re
import subprocess
from html.parser import HTMLParser

import httpx
import msgspec
import pytest

from penstock.router.api.web_pages import FILES, FOLDER, POLICY
from penstock.router.completions.dependencies import PoolReplicas
from penstock.router.config import GatewayConfig
from penstock.router.models.served_model import ServedModel
from penstock.tenancy.tenants import Settings
from penstock.wire.status import Status
from tests.unit.router.http_fakes import CONTEXT, MODEL, TOKENIZER, running_gateway

PAGES = [path for path, (name, _) in FILES.items() if name.endswith(".html")]
HTML_READERS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage")
"""What a script of ours must not use: text becomes elements or a script by it, or a key would be kept."""


class Reader(HTMLParser):
    """The addresses, and the attributes and elements that a strict policy forbids, of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.forbidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.addresses += [value for name in ("href", "src") if (value := named.get(name)) is not None]
        self.forbidden += [name for name in named if name == "style" or name.startswith("on")]
        if tag in ("style", "iframe", "object", "base") or (tag == "script" and "src" not in named):
            self.forbidden.append(tag)


async def fetch(path: str, method: str = "GET") -> httpx.Response:
    """The response to a stranger, without a key."""
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        return await world.client.request(method, path)


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_every_file_is_served_without_a_key_under_the_strict_policy(path: str, method: str) -> None:
    response = await fetch(path, method)

    assert response.status_code == 200
    assert response.headers["content-type"] == FILES[path][1].decode()
    assert response.headers["content-security-policy"] == POLICY.decode()
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY.decode()


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(name for name, _ in FILES.values())


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_has_nothing_inline_and_names_only_what_the_gateway_serves(path: str) -> None:
    reader = Reader()
    reader.feed((await fetch(path)).text)

    assert reader.forbidden == []
    assert len(reader.addresses) > 3
    for address in reader.addresses:
        if address.startswith("#"):  # a place on the page
            continue
        assert address.startswith("/"), address
        assert (await fetch(address)).status_code == 200, address


async def test_no_script_reads_html_or_names_another_server_and_all_imports_are_there() -> None:
    for path, (name, _) in FILES.items():
        text = (await fetch(path)).text
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']+", text) == [], path
        if name.endswith(".js"):
            assert not [word for word in HTML_READERS if word in text], path
            for imported in re.findall(r"from \"\./([^\"]+)\"", text):
                assert f"/docs/{imported}" in FILES, path


async def test_a_stranger_learns_nothing_of_models_and_pools() -> None:
    for path in FILES:
        text = (await fetch(path)).text

        assert MODEL not in text.split()
        assert "pool-a" not in text
    assert (await fetch("/v1/status")).status_code == 401


async def test_a_pages_file_is_not_on_the_admin_port() -> None:
    async with running_gateway(config=GatewayConfig(admin_port=8001)) as world:
        statuses = [
            (await world.client.get(f"http://gateway:{port}{path}")).status_code
            for port in (8000, 8001)
            for path in ("/", "/docs")
        ]

        assert statuses == [200, 200, 404, 404]


async def test_the_status_counts_the_replicas_of_each_model_and_of_all_tiers() -> None:
    def served(name: str, pools: tuple[str, ...], *others: ServedModel) -> ServedModel:
        return ServedModel(name, pools, TOKENIZER, lambda: CONTEXT, "0123456789abcdef", others=others)

    models = {"a": served("a", ("pool-a",)), "b": served("b", ("pool-a",), served("b", ("pool-b", "pool-c")))}
    async with running_gateway(models=models) as world:
        world.pools += [PoolReplicas("pool-b", "cloud", 3)]
        status = msgspec.json.decode((await world.client.get("/v1/status")).content, type=Status)

        assert status.is_ready
        assert [(model.id, model.replicas, model.max_model_len) for model in status.models] == [
            ("a", 2, CONTEXT),
            ("b", 5, CONTEXT),
        ]
        world.pools.clear()
        status = msgspec.json.decode((await world.client.get("/v1/status")).content, type=Status)
        assert not status.is_ready
        assert [model.replicas for model in status.models] == [0, 0]


async def test_the_status_holds_no_model_that_the_tenant_may_not_use() -> None:
    async with running_gateway(settings=Settings(models=("another",))) as world:
        listed = (await world.client.get("/v1/models")).json()["data"]
        status = (await world.client.get("/v1/status")).json()

        assert listed == status["models"] == []


def test_the_files_are_packaged() -> None:
    """The wheel takes every file below `platform` that git does not ignore."""
    ignored = subprocess.run(
        ["git", "check-ignore", *FOLDER.iterdir()], cwd=FOLDER, capture_output=True, check=False, text=True
    )

    assert ignored.stdout == ""
