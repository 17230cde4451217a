"""A folder that grows into a checkpoint: it stands beside its place, under that name and `.partial`, until it is whole.

A run that ends in the middle leaves it there, and the next run with the same recipe goes on with it. Invariants: a file
in it is complete, or its name ends in `.tmp`; one process at a time writes to it; what a run with another recipe, or
somebody else, put there is left alone.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from penstock.base.errors import ConfigError

RECIPE_FILE = "quantize.json"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is made of: equal recipes make the same one."""

    model: str
    """Digest of the checkpoint it is made from."""
    calibration: str
    """Hash of the token ids it is calibrated with."""
    group_size: int


def refuse_taken(out: Path) -> None:
    """Raises ConfigError where something stands at `out`."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a folder that does not")


@contextmanager
def open_partial_checkpoint(out: Path, recipe: Recipe) -> Iterator[Path]:
    """Open the partial folder of `out`, and rename it to `out` when the body is through. Raises ConfigError
    where the folder can't be made or is not ours."""
    refuse_taken(out)
    out = out.absolute()
    folder = out.with_name(f"{out.name}.partial")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        is_foreign = not (folder / RECIPE_FILE).exists() and any(folder.iterdir())
    if is_foreign:
        raise ConfigError(
            f"{folder} is in the way: it is not the beginning of a checkpoint that penstock quantize was making"
        )
    with writing(folder):
        fd = os.open(folder / RECIPE_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _begin(fd, folder, recipe)
        yield folder
        with writing(out):
            folder.rename(out)
    finally:
        os.close(fd)  # and with it goes the lock


def _begin(fd: int, folder: Path, recipe: Recipe) -> None:
    """Lock the folder, and write the recipe into it. Raises ConfigError where another process has the lock, or where
    the folder has another recipe."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another penstock quantize is writing {folder}") from error
    wanted = msgspec.json.format(msgspec.json.encode(recipe)) + b"\n"
    begun = os.pread(fd, 2 * len(wanted), 0)
    if begun not in (b"", wanted):
        raise ConfigError(
            f"{folder} is the beginning of another checkpoint (of another model, calibration or group size); "
            "delete it, or repeat what began it"
        )
    with writing(folder):
        os.pwrite(fd, wanted, 0)


def save_whole(path: Path, save: Callable[[Path], object]) -> None:
    """`save` writes the file that it is given; it bears its own name when it is complete and on disk. Raises
    ConfigError where it can't be."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            save(unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into a ConfigError with a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"can't write {path}: {reason}; what is complete is kept, and the same command goes on behind it"
        ) from error
