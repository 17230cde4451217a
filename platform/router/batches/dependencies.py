"""What files and batches are kept in."""

from pathlib import Path
from typing import NamedTuple

import redis.asyncio

from penstock.router.batches.batch_registry import BatchRegistry
from penstock.router.batches.config import BatchesConfig
from penstock.router.batches.file_registry import FileRegistry
from penstock.router.batches.folder import BatchFolder


class BatchDependencies(NamedTuple):
    """Registries, folder and settings."""

    config: BatchesConfig
    files: FileRegistry
    batches: BatchRegistry
    folder: BatchFolder


def make_dependencies(config: BatchesConfig, client: redis.asyncio.Redis) -> BatchDependencies:
    """config: with a folder. client: made without `decode_responses`."""
    assert config.folder is not None, "a gateway with batches is started with their folder"
    return BatchDependencies(config, FileRegistry(client), BatchRegistry(client), BatchFolder(Path(config.folder)))
