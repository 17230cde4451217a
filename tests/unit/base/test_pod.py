import asyncio
import subprocess
from pathlib import Path

from penstock.base.pod import Pod, drain


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_who_serves_says_so_and_who_has_drained_too(tmp_path: Path) -> None:
    pod = Pod(tmp_path / "pod")

    pod.mark_ready()
    assert names(tmp_path / "pod") == {"ready"}
    pod.mark_drained()
    assert names(tmp_path / "pod") == {"drained"}


def test_a_container_that_starts_again_forgets_what_the_one_before_left(tmp_path: Path) -> None:
    for name in ("ready", "drain", "drained"):
        (tmp_path / name).touch()

    Pod(tmp_path)

    assert names(tmp_path) == set()


async def test_a_hook_asks_and_waits_until_it_is_done(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.mark_ready()
    asking = asyncio.create_task(asyncio.to_thread(drain, tmp_path, 20.0))
    async with asyncio.timeout(20):
        await pod.wait_for_drain()
    assert not asking.done()
    pod.mark_drained()

    assert await asking


def test_a_hook_does_not_wait_for_ever(tmp_path: Path) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    Pod(tmp_path).mark_ready()

    assert not drain(tmp_path, 60.0, sleep, lambda: now)
    assert 60.0 < now < 61.0


def test_a_hook_does_not_wait_where_nobody_serves(tmp_path: Path) -> None:
    Pod(tmp_path)

    assert drain(tmp_path, 60.0, lambda _: None, lambda: 0.0)
    assert names(tmp_path) == set()


def test_a_hook_does_not_wait_for_a_process_that_was_killed(tmp_path: Path) -> None:
    Pod(tmp_path)
    process = subprocess.Popen(["sleep", "60"])
    (tmp_path / "ready").write_text(f"{process.pid}\n")

    def sleep(_: float) -> None:
        process.kill()
        process.wait()

    assert drain(tmp_path, 60.0, sleep, lambda: 0.0)
    assert drain(tmp_path, 60.0, lambda _: None, lambda: 0.0), "nor when it is gone already"


def test_elsewhere_than_in_a_pod_nothing_is_written() -> None:
    pod = Pod(None)

    pod.mark_ready()
    pod.mark_stopped()
    pod.mark_drained()
