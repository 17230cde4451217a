"""An upgrade of chart and image, from the last release in which the Ray application `serve-agent` was called `hand`,
while a pool is scaled up and serves. The old Ray cluster's agent and the new autoscaler meet in Redis
(`wire.serve_agent`).
"""

import subprocess
import tarfile
from collections.abc import Callable
from io import BytesIO
from itertools import groupby
from pathlib import Path

import pytest

from tests.e2e.images import Images, image_of_revision
from tests.e2e.kube import ROOT, Kube, until
from tests.e2e.load import assert_none_failed, load
from tests.e2e.release import PRESET, Release, install, namespace, storage
from tests.e2e.test_under_load import LONG_LOAD, SWITCH_S, clusters, group, ready, upgraded, watching

pytestmark = pytest.mark.timeout(1500)

BEFORE = "d26678d"
"""Revision of the release before."""
SMALL = [
    "gateway.replicas=1",
    *[
        value
        for pool in ("pools[0]", "pools[1]")
        for value in (f"{pool}.engine.runner=timed", pool + '.engine.timed={"base_s":0.1}')
    ],
]
"""Values under which two whole platforms with three replicas each fit on two cores: replicas wait instead of
computing; and one gateway, since each worker pod takes 200m for as long as it lives, by an init container of
KubeRay's."""


def export(revision: str, folder: Path) -> Path:
    """The files of that revision. Skips where they are not in the repository."""
    done = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the repository does not have the revision {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_scaled_platform_is_upgraded_from_the_release_before(
    kube: Kube, built: Images, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if kube.own is None:
        pytest.skip("the image of the release before is made on the tests' own cluster only")
    source = export(BEFORE, tmp_path / "before")
    before = image_of_revision(kube, built.penstock, source, tmp_path)
    (tmp_path / "volumes").mkdir()
    storage(kube, tmp_path / "volumes")
    with namespace(kube) as own:
        old = Release(kube, "old", own, Images(before, built.redis))
        release = old._replace(images=built)
        install(old, *SMALL, chart=source / "deploy" / "helm", preset=source / PRESET)
        first = release.active()
        with load(release, tmp_path, *LONG_LOAD) as found:
            up_s = until(lambda: ready(release).get("pool-cloud") == 2, "two replicas of the scaled pool")
            upgraded(release, *SMALL)
            until(lambda: len(clusters(release)) == 2, "a second Ray cluster beside the first")
            (second,) = clusters(release) - {first}
            with watching(release, tmp_path, second) as states:
                switch_s = until(lambda: release.active() == second, "the new Ray cluster is active", SWITCH_S)
                until(lambda: clusters(release) == {second}, "the old Ray cluster is gone", SWITCH_S)
                counts = [count for count, _ in groupby(group(state, "pool-cloud")["replicas"] for state in states())]
            images = {release.image(pod) for part in ("gateway", "pool", "head") for pod in release.pods(part)}

    record_property(
        "figures",
        f"scaled to 2 in {up_s:.0f} s, the new release active after {switch_s:.0f} s, replicas of the pool there "
        f"{counts}, {found.outcomes['finished']} requests meanwhile",
    )
    assert images == {built.penstock}
    assert counts in ([1, 2], [2]), "the target of 2 is handed over, and kept"
    assert_none_failed(found, 50)
