"""/v1/adapters as structs: a tenant's LoRA adapters."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class AdapterImport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/adapters where it is JSON: one of `source` and `path` says where the two files are. As
    multipart/form-data it has `name`, `base_model` and the two files."""

    name: Annotated[str, Meta(min_length=1)]
    source: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=8192,
                description=(
                    "`https://...` of an archive (.tar, .tar.gz, .tgz, .zip) or of a folder with the two files,"
                    " `s3://BUCKET/PREFIX`, `hub:OWNER/NAME`, `hub:OWNER/NAME@REVISION` or `folder:NAME`"
                ),
            ),
        ]
        | None
    ) = None
    path: (
        Annotated[str, Meta(min_length=1, description="Folder under the tenant's import folder, as `folder:` names it")]
        | None
    ) = None
    digest: (
        Annotated[
            str,
            Meta(
                pattern="^(sha256:[0-9a-fA-F]{64}|[0-9a-fA-F]{32})$",
                description=(
                    "What must come: `sha256:` of the archive, else of adapter_model.safetensors; or the adapter's"
                    " `digest`, which covers both files"
                ),
            ),
        ]
        | None
    ) = None
    base_model: (
        Annotated[str, Meta(description="Model that it was trained for; not needed where only one is served")] | None
    ) = None


class AdapterReplicas(msgspec.Struct, frozen=True, kw_only=True):
    live: int
    """Replicas that could serve the adapter."""
    loaded: int
    """Replicas that have the adapter in memory now; the others load it when a request comes to them."""
    where: tuple[str, ...] = ()
    """Ids of those that have it, as `x-penstock-replica` has them."""


class AdapterUses(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of the adapter at the live replicas, since each one's start."""

    hits: int = 0
    """The tenant's sequences that found it in memory."""
    waits: int = 0
    """The tenant's sequences that had to wait until it was loaded."""
    loads: int = 0
    evictions: int = 0
    """Times that it left the memory of a replica, for another one."""


class AdapterOut(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Name of the adapter, which requests give as their model."""
    object: Literal["adapter"] = "adapter"
    created: int
    base_model: str
    digest: str
    """Digest of the adapter's two files."""
    version: int
    """1, and one more with every change under this name."""
    rank: int
    target_modules: tuple[str, ...]
    size_bytes: int
    state: Literal["loaded", "partly_loaded", "stored"]
    """Whether all live replicas have the adapter in memory, some of them, or none: requests work in any case."""
    replicas: AdapterReplicas
    uses: AdapterUses = AdapterUses()
    error: str | None = None
    """Why a replica could not load it."""


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[AdapterOut]


class AdapterDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True
