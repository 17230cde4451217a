"""Objects of a test's cluster by their paths, as plain JSON, through the client that the autoscaler has."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio.client import ApiClient

from penstock.autoscale.kubernetes.client import JSON_PATCH, Account, open_client
from penstock.autoscale.kubernetes.resources import Document


class Objects:
    """Calls on paths, which begin with /api or /apis. Every call raises ApiException."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client

    async def get(self, path: str, **query: str) -> Document:
        """One object, or a list of a collection."""
        return await self._call("GET", path, query=query)

    async def create(self, path: str, document: Document) -> Document:
        return await self._call("POST", path, document)

    async def update(self, path: str, document: Document) -> Document:
        return await self._call("PUT", path, document)

    async def patch(self, path: str, operations: list[Document]) -> Document:
        """Applies a JSON patch (RFC 6902)."""
        return await self._call("PATCH", path, operations, content_type=JSON_PATCH)

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Document:
        parameters: tuple[Any, ...] = await self.client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = await self.client.call_api(*parameters)
        found: Document = await response.response.json(content_type=None)
        return found


@asynccontextmanager
async def open_objects(account: Account) -> AsyncIterator[Objects]:
    async with open_client(account) as client:
        yield Objects(client)
