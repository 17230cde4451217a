"""A fake server in a process of its own, so that its work does not disturb the measurement."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.truth import Truth, read_truths

STOP_S = 10.0


class FakeProcess(NamedTuple):
    """A fake server that runs in another process."""

    url: str
    pid: int
    folder: Path
    process: "subprocess.Popen[str]"

    def stop(self) -> list[Truth]:
        """End the process, if it has not ended; returns the truths of all requests."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return read_truths(self.folder / "truth.jsonl")


@contextmanager
def fake_server_process(behaviour: Behaviour, *, core: int | None = None) -> Iterator[FakeProcess]:
    """A fake server that runs while the context lasts, on one core if that is named. Raises TargetUnreachable when it
    does not start."""
    with tempfile.TemporaryDirectory(prefix="penstock-fake-") as name:
        folder = Path(name)
        (folder / "behaviour.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(behaviour)), encoding="utf-8")
        options = ["--config", str(folder / "behaviour.yaml"), "--truth", str(folder / "truth.jsonl")]
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock_loadtest.fake.server", *options], stdout=subprocess.PIPE, text=True
        )
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        with process.stdout:
            url = process.stdout.readline().strip()
            fake = FakeProcess(url, process.pid, folder, process)
            try:
                if not url:
                    raise TargetUnreachable(f"The fake server ended with {process.wait(STOP_S)} before it listened.")
                yield fake
            finally:
                fake.stop()
