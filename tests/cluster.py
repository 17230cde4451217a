"""A Kubernetes of a test's own, started and ended by the program that PENSTOCK_TEST_CLUSTER names (docs/testing.md says
how it is called)."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

UP_S = 180.0
LOAD_S = 300.0
COMMAND_S = 120.0
ABSENT = "PENSTOCK_TEST_CLUSTER names no program that starts a test cluster"
"""Why a test is skipped, as tests/allowed_skips.txt has it."""


@dataclass(frozen=True)
class Cluster:
    program: str
    folder: Path

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` where the API server, pods and Services can be reached."""
        return [self.program, "exec", "--dir", str(self.folder), "--", *command]

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = COMMAND_S) -> str:
        """What it prints, errors included. Fails the test when kubectl fails."""
        done = subprocess.run(
            self.inside("kubectl", *arguments),
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            text=True,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}"
        return done.stdout

    def apply(self, *objects: dict[str, object]) -> None:
        self.kubectl("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def load(self, archive: Path) -> None:
        """An image for its nodes, as `docker save` writes one."""
        subprocess.run([self.program, "load", "--dir", str(self.folder), str(archive)], timeout=LOAD_S, check=True)


def cluster_program() -> str:
    """Path of the program that starts a test cluster. Skips the test where none is named."""
    program = os.environ.get("PENSTOCK_TEST_CLUSTER")
    if not program:
        pytest.skip(ABSENT)
    return program


@contextmanager
def running_cluster(*options: str, must: bool = False) -> Iterator[Cluster]:
    """options: of `up`. Skips the test where there is no such program, or where it can't start what is asked (a bare
    container). must: that fails."""
    program = cluster_program()
    folder = Path(tempfile.mkdtemp(prefix="kube-"))  # short: it holds sockets
    try:
        with tempfile.TemporaryFile("w+") as said:
            started = subprocess.run(
                [program, "up", "--dir", str(folder), *options], stderr=said, timeout=UP_S, check=False
            )
            if started.returncode != 0:  # it has taken down itself what it had started
                said.seek(0)
                reason = f"{ABSENT} here: {(said.read().strip() or 'it said nothing').splitlines()[-1]}"
                assert not must, reason
                pytest.skip(reason)
        try:
            yield Cluster(program, folder)
        finally:
            subprocess.run([program, "down", "--dir", str(folder)], timeout=UP_S, check=True)
    finally:
        shutil.rmtree(folder)
