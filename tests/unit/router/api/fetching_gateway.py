"""A gateway that fetches adapters from a server on a real socket."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from penstock.adapters.config import SourcesConfig
from penstock.adapters.sources.bring import SourceSecrets
from penstock.adapters.sources.signature import S3Key
from penstock.base.tls import TlsFiles
from tests.unit.adapters.sources.servers import (
    Handler,
    Names,
    Server,
    serve,
)
from tests.unit.router.api.adapter_fakes import Adapters, FakeRemote, serving

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
