"""What an uninstall keeps is what an install of the same name takes up again."""

from pathlib import Path

import pytest

from tests.e2e.images import Images
from tests.e2e.kube import Kube
from tests.e2e.release import Release, install, namespace, storage

pytestmark = pytest.mark.timeout(900)


def test_tenants_and_their_keys_outlive_an_uninstall_that_retains(kube: Kube, built: Images, tmp_path: Path) -> None:
    storage(kube, tmp_path)
    with namespace(kube) as own:
        release = Release(kube, "kept", own, built)
        install(release, "redis.persistence.whenDeleted=Retain")
        release.penstock("tenant", "create", "acme")
        key = release.penstock("key", "create", "acme").strip()
        first = release.key()
        notes = release.helm("get", "notes", release.name)
        release.helm("uninstall", release.name, "--wait", "--timeout=300s")
        release.kubectl("wait", "pods", "--all", "--for=delete", "--timeout=180s", timeout_s=200)
        install(release, "redis.persistence.whenDeleted=Retain")
        streamed = release.kube.client("streamed", url=release.url(), key=key, model="demo")
        used = release.kube.client("used", url=release.url(), key=key)
        second = release.kube.client("status", url=release.url(), key=release.key())

        assert "pvc/data-kept-penstock-redis-0" in notes
        assert "secret/kept-penstock-cluster" in notes
        assert "Paris" in streamed["text"]
        assert used > 0, "on the tenant's bill"
        assert (first == release.key(), second) == (False, 200), "the first tenant's key is made at each install"
