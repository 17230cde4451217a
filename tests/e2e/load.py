"""A load from inside the cluster's network while something is done to the platform, and its ledger."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.kube import ROOT
from tests.e2e.release import Release

SCENARIO = "tests/e2e/steady.yaml"
PROGRAM = ROOT / ".venv" / "bin" / "penstock-loadtest"
STOP_S = 240.0
FINISHED = re.compile(r"(\d+) finished")


class Load:
    """What it found is there once it has ended."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = log

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by how they ended: finished, shed, failed, unfinished."""
        found: dict[str, int] = self._read("summary.json")["outcomes"]
        return found

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("outcome") in ("failed", "shed", "unfinished")]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def violations(self) -> list[Any]:
        """What the ledger has against the answers; none: the books balance."""
        found = self._read("ledger.json")
        return list(found["violations"]) if not found["is_balanced"] else []

    def finished(self) -> int:
        """Requests, as far as the tester has said: every five seconds."""
        said = FINISHED.findall(self._log.read_text(encoding="utf-8"))
        return int(said[-1]) if said else 0

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
        return found


@contextmanager
def load(release: Release, folder: Path, *settings: str, model: str = "demo") -> Iterator[Load]:
    """Load of one tenant, for as long as the context. settings: of the scenario, as in arrivals.rate=2."""
    options = [word for setting in settings for word in ("--set", setting)]
    command = [
        str(PROGRAM),
        "run",
        SCENARIO,
        "--url",
        f"{release.url()}/v1",
        "--model",
        model,
        "--no-plots",
        "--out",
        str(folder / "run"),
        *options,
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            release.kube.enter(*command),
            cwd=ROOT,
            env={**os.environ, "OPENAI_API_KEY": release.key()},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            yield Load(folder / "run", log)
            assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
        finally:
            process.send_signal(signal.SIGTERM)  # nothing more is sent, and what is under way may end
            process.wait(STOP_S)


def assert_none_failed(found: Load, least: int) -> None:
    """Every request that was sent was answered whole, and the books balance. least: so many at least."""
    assert found.errors == []
    assert found.outcomes["failed"] == found.outcomes["shed"] == found.outcomes["unfinished"] == 0
    assert found.outcomes["finished"] >= least, found.outcomes
    assert found.violations == []
