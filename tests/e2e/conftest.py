"""One cluster, its images and one installation of values-demo for all end-to-end tests of a run."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.base.redis_server import EmbeddedRedis, find_executable
from tests.e2e.clients import CA
from tests.e2e.flows import Recording, recording
from tests.e2e.images import Images, images
from tests.e2e.kube import Kube, kubernetes
from tests.e2e.release import IS_ENCRYPTED, Release, install, namespace, storage


@pytest.fixture
def redis_url(tmp_path: Path, socket_dir: Path) -> Iterator[str]:
    """A Redis of the test's own, for parts that run as processes."""
    server = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path / "redis", socket_dir=socket_dir)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def kube() -> Iterator[Kube]:
    with kubernetes() as found:
        yield found


@pytest.fixture(scope="session")
def built(kube: Kube) -> Images:
    with tempfile.TemporaryDirectory() as folder:
        return images(kube, Path(folder))


@pytest.fixture(scope="session")
def recorded(kube: Kube) -> Iterator[Recording]:
    """All connections from before the installation on."""
    if kube.own is None:
        pytest.skip("conntrack is the node's: seen on the tests' own cluster only")
    with tempfile.TemporaryDirectory() as folder, recording(kube, Path(folder)) as found:
        yield found


@pytest.fixture(scope="session")
def release(kube: Kube, built: Images, request: pytest.FixtureRequest) -> Iterator[Release]:
    """Installed, and ready to serve. What goes wrong is shown with the cluster's own account of it."""
    if kube.own is not None:
        request.getfixturevalue("recorded")
    with tempfile.TemporaryDirectory() as folder, namespace(kube) as name:
        storage(kube, Path(folder))
        found = Release(kube, "demo", name, built, IS_ENCRYPTED)
        try:
            install(found)
            if IS_ENCRYPTED:
                path = Path(folder) / "ca.crt"
                found.save_ca(path)
                os.environ[CA] = str(path)
            yield found
        except BaseException as error:
            error.add_note(found.account())
            raise


ON_ONE_CLUSTER = (
    "test_install",
    "test_under_load",
    "test_traffic",
    "test_uninstall",
    "test_reinstall",
    "test_upgrade",
    "test_walkthrough",
)
"""Tests of one installation, in the order of its life; behind the tests that have clusters of their own, and the
machine to themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ON_ONE_CLUSTER.index(item.path.stem) if item.path.stem in ON_ONE_CLUSTER else -1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Adds what the pods were doing to the report of a failed test."""
    report = yield
    release = getattr(item, "funcargs", {}).get("release")
    if isinstance(report, pytest.TestReport) and report.failed and isinstance(release, Release):
        report.sections.append(("cluster", release.account()))
    return report


def pytest_report_header() -> str:
    return json.dumps({"end to end": "a real API server, KubeRay's operator, real pods"})
