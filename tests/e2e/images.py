"""The images of the end-to-end tests, without a registry: Penstock's from the working tree, and one of Redis from
Debian's package."""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster import Cluster
from tests.e2e.kube import ROOT, Kube

BASE = "localhost/python-base:12"
PENSTOCK = "localhost/penstock:e2e"
REDIS = "localhost/redis:e2e"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,wget,curl,procps,ca-certificates"
BUILD_S = 1800.0
ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
CERTIFICATES = "/etc/ssl/certs"


class Images(NamedTuple):
    penstock: str
    redis: str


def images(kube: Kube, folder: Path) -> Images:
    """The images, put on the cluster's nodes. Skips where nothing can build them."""
    named = os.environ.get("PENSTOCK_E2E_IMAGE"), os.environ.get("PENSTOCK_E2E_REDIS_IMAGE")
    if kube.own is None:
        if not all(named):
            pytest.skip(
                "PENSTOCK_E2E_IMAGE and PENSTOCK_E2E_REDIS_IMAGE name no images for the cluster that KUBECONFIG names"
            )
        return Images(str(named[0]), str(named[1]))
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool}, which makes images without a registry, is not installed")
    found = Images(named[0] or _penstock(), named[1] or _redis())
    for name in found:
        _load(kube.own, name, folder)
    return found


def another(kube: Kube, of: str, name: str, folder: Path) -> str:
    """The same image under another name, with one more label: what an upgrade to a new image needs."""
    container = _buildah("from", of).strip()
    _buildah("config", "--label", f"penstock.e2e={name}", container)
    _buildah("commit", "-q", "--rm", container, name)
    assert kube.own is not None
    _load(kube.own, name, folder)
    return name


def image_of_revision(kube: Kube, of: str, source: Path, folder: Path) -> str:
    """The same image with the platform's code of another revision, whose files are in `source`."""
    name = f"{of.rpartition(':')[0]}:e2e-before"
    container = _buildah("from", of).strip()
    root = Path(_buildah("mount", container).strip())
    code = root / "opt" / "penstock" / "penstock"
    shutil.rmtree(code)
    shutil.copytree(source / "platform", code)
    _buildah("umount", container)
    _buildah("commit", "-q", "--rm", container, name)
    assert kube.own is not None
    _load(kube.own, name, folder)
    return name


def _load(cluster: Cluster, name: str, folder: Path) -> None:
    """Puts an image on the cluster's nodes."""
    archive = folder / "image.tar"
    _buildah("push", "-q", name, f"docker-archive:{archive}:{name}")
    cluster.load(archive)
    archive.unlink()


def _base() -> None:
    """Debian with Python, once."""
    if _has(BASE):
        return
    container = _buildah("from", "scratch").strip()
    root = _buildah("mount", container).strip()
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root],
        check=True,
        timeout=BUILD_S,
        stdout=subprocess.DEVNULL,
    )
    _buildah("umount", container)
    _buildah("commit", "-q", "--rm", container, BASE)


def _penstock() -> str:
    _base()
    certificates = ["-v", f"{CERTIFICATES}:{CERTIFICATES}:ro"] if Path(CERTIFICATES).is_dir() else []
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--layers",
            "--network",
            "host",
            *certificates,
            *_pip_settings(Path(folder)),
            "--build-arg",
            f"BASE={BASE}",
        ]
        _buildah("build", "-q", *options, "--target", "cpu", "-t", PENSTOCK, "-f", "deploy/docker/Dockerfile", ".")
    return PENSTOCK


def _pip_settings(folder: Path) -> list[str]:
    """What pip goes by on this machine, inside the build too, and not in the image: a configuration file, and the
    folders and files that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings = {
        name.rpartition(".")[2]: ast.literal_eval(value)
        for name, _, value in (line.partition("=") for line in listed.splitlines())
    }
    path = folder / "pip.conf"
    path.write_text(
        "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""]), encoding="utf-8"
    )
    words = [word for value in settings.values() for word in value.split()]
    indexes = {
        str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")
    }  # they link to what lies beside them
    named = sorted({word for word in words if word.startswith("/")} | indexes)
    return [
        option
        for each in (f"{path}:/etc/pip.conf:ro", *(f"{each}:{each}:ro" for each in named if Path(each).exists()))
        for option in ("-v", each)
    ]


def _redis() -> str:
    _base()
    _buildah(
        "build",
        "-q",
        "--layers",
        "--network",
        "host",
        "--build-arg",
        f"BASE={BASE}",
        "-t",
        REDIS,
        "-f",
        "tests/e2e/redis.Dockerfile",
        "tests/e2e",
    )
    return REDIS


def _has(name: str) -> bool:
    return (
        subprocess.run(
            ["buildah", "inspect", "--type", "image", name],
            capture_output=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        ).returncode
        == 0
    )


def _buildah(*arguments: str) -> str:
    command = ["buildah", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-4000:]}"
    return done.stdout
