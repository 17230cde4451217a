"""Secrets as the configuration names them, and threads that end before a cancellation goes on."""

import asyncio
import threading
from pathlib import Path

import pytest

from penstock.adapters.config import AdaptersConfig, HubSource, S3Source, SourcesConfig
from penstock.adapters.sources.bring import NO_SECRETS, Sources, SourceSecrets, read_secrets
from penstock.adapters.sources.download import in_thread
from penstock.adapters.sources.signature import S3Key
from penstock.base.errors import ConfigError


def test_secrets_are_read_by_the_names_that_the_configuration_has() -> None:
    asked: list[str] = []

    def read(variable: str, setting: str) -> str:
        asked.append(setting)
        return variable.lower()

    s3 = S3Source(access_key_env="A", secret_key_env="B", allow=("b",))
    both = SourcesConfig(s3=s3, hub=HubSource(token_env="T", allow=("o",)))
    temporary = SourcesConfig(s3=S3Source(access_key_env="A", secret_key_env="B", session_token_env="C", allow=("b",)))

    assert read_secrets(both, read) == SourceSecrets(S3Key("a", "b"), "t")
    assert asked == [
        "adapters.sources.s3.access_key_env",
        "adapters.sources.s3.secret_key_env",
        "adapters.sources.hub.token_env",
    ]
    assert read_secrets(temporary, read).s3_key == S3Key("a", "b", "c")
    assert read_secrets(SourcesConfig(s3=S3Source(), hub=HubSource()), read) == NO_SECRETS
    assert repr(read_secrets(both, read)) == "SourceSecrets"


def test_a_file_of_cas_that_is_none_fails_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")

    for path in ("absent", "ca"):
        with pytest.raises(ConfigError, match=r"adapters\.sources\.ca_file"):
            Sources(AdaptersConfig(sources=SourcesConfig(ca_file=str(tmp_path / path))), NO_SECRETS, lambda: 0.0)


async def test_who_cancels_waits_for_the_thread() -> None:
    began, go_on = asyncio.Event(), threading.Event()
    loop, ended = asyncio.get_running_loop(), []

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        go_on.wait()
        ended.append(True)

    task = asyncio.create_task(in_thread(work))
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    still_waits = not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert still_waits
    assert ended == [True]
