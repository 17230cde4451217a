"""The container image, run as docs/images.md says and as a pod under Pod Security `restricted`: non-root, nothing but
/tmp to write to.

`make image` builds one; PENSTOCK_TEST_IMAGE names it in full (localhost/penstock:cpu where podman or buildah built it).
docker or podman runs it here; the pods need a Kubernetes with a real node (PENSTOCK_TEST_CLUSTER).
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest

from tests.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

START_S = 240.0
GRACE_S = 60
ANSWER_S = 4.0
"""Seconds of the answer that is under way when SIGTERM comes; a gateway gives 10 s."""
UID = 1000
NAMESPACE = "restricted"
STATE = "/tmp/penstock"
QUESTION = "What is the capital of France?"
RAY_HEAD = "ray start --head --block --num-cpus=0 --dashboard-host=0.0.0.0 --dashboard-agent-listen-port=52365"
RAY_HEALTH = (
    "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success && "
    "wget --tries 1 -T 2 -q -O- http://localhost:8265/api/gcs_healthz | grep success"
)
"""Commands of KubeRay's probes."""
RAY_TASK = """
import importlib, os, ray
ray.init(address="auto", log_to_driver=False)
found = ray.remote(num_cpus=0)(lambda: (os.getuid(), importlib.import_module("penstock.workers.replica").__name__))
print(*ray.get(found.remote()))
"""


@dataclass(frozen=True)
class Running:
    """A started container that is ready."""

    outside: Callable[[str], list[str]]
    """A shell script, as the command line that runs it where `url` can be reached."""
    inside: Callable[[str], str]
    """What a shell script prints in the container, errors included."""
    stop: Callable[[], None]
    """SIGTERM, and SIGKILL after GRACE_S; returns when the container is gone."""
    url: str
    log: Path
    ready_s: float

    def request(self, **parameters: object) -> list[str]:
        """The command line of a client that asks QUESTION."""
        key = re.search(
            r"OPENAI_API_KEY=(\S+)",
            self.inside(f"timeout 30 bash -c 'until cat {STATE}/env; do sleep 0.1; done' 2>/dev/null"),
        )
        assert key is not None
        body = json.dumps(
            {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **parameters}
        )
        headers = f"-H 'Authorization: Bearer {key[1]}' -H 'Content-Type: application/json'"
        return self.outside(
            f"exec curl -sS --noproxy '*' -N -m 120 {self.url}/v1/chat/completions {headers} -d '{body}'"
        )


@pytest.fixture(scope="module")
def image() -> str:
    name = os.environ.get("PENSTOCK_TEST_IMAGE")
    if not name:
        pytest.skip("PENSTOCK_TEST_IMAGE names no image; make image builds one")
    return name


@pytest.fixture(scope="module")
def engine(image: str) -> str:
    found = next((tool for tool in ("docker", "podman") if shutil.which(tool) and _succeeds(tool, "info")), None)
    assert found is not None, "PENSTOCK_TEST_IMAGE names an image, but neither docker nor podman is here to run it"
    return found


@pytest.fixture(scope="module")
def cluster(engine: str, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the image on its node, and a namespace that admits nothing but restricted pods."""
    archive = tmp_path_factory.mktemp("archive") / "image.tar"
    with running_cluster("--nodes", "real") as found:
        _said(engine, "save", "-o", str(archive), image)
        found.load(archive)
        archive.unlink()
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        found.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
        yield found


@pytest.fixture(scope="module", params=["container", "pod"])
def running(request: pytest.FixtureRequest, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp(request.param) / "log"
    if request.param == "container":
        with container(request.getfixturevalue("engine"), image, log) as found:
            yield found
    else:
        with pod(request.getfixturevalue("cluster"), image, log) as found:
            yield found


@contextmanager
def container(engine: str, image: str, log: Path) -> Iterator[Running]:
    name = f"penstock-test-{os.getpid()}"
    started = time.monotonic()
    command = [
        engine,
        "run",
        "--rm",
        "--name",
        name,
        "--read-only",
        "--tmpfs",
        "/tmp",
        "--cap-drop",
        "ALL",
        "-p",
        "127.0.0.1::8000",
        image,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )

    def stop() -> None:
        _said(engine, "stop", "-t", str(GRACE_S), name)
        process.wait(GRACE_S)

    try:
        while not _succeeds(engine, "exec", name, "wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8000/readyz"):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < started + START_S, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        ready_s = time.monotonic() - started
        yield Running(
            outside=lambda script: ["bash", "-c", script],
            inside=lambda script: _said(engine, "exec", name, "bash", "-c", script),
            stop=stop,
            url=f"http://{_said(engine, 'port', name, '8000').splitlines()[0]}",
            log=log,
            ready_s=ready_s,
        )
    finally:
        if process.poll() is None:
            stop()


@contextmanager
def pod(cluster: Cluster, image: str, log: Path) -> Iterator[Running]:
    started = time.monotonic()
    cluster.apply(
        restricted_pod(
            "penstock", image, {"readinessProbe": {"httpGet": {"path": "/readyz", "port": 8000}, "periodSeconds": 1}}
        )
    )
    try:
        await_ready(cluster, "penstock")
        ready_s = time.monotonic() - started
        with log.open("wb") as out:
            command = cluster.inside("kubectl", "logs", "-n", NAMESPACE, "--follow", "penstock")
            follower = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        address = cluster.kubectl("get", "pod", "-n", NAMESPACE, "penstock", "-o", "jsonpath={.status.podIP}")

        def stop() -> None:
            remove_pod(cluster, "penstock")
            follower.wait(GRACE_S)

        yield Running(
            outside=lambda script: cluster.inside("bash", "-c", script),
            inside=lambda script: cluster.kubectl("exec", "-n", NAMESPACE, "penstock", "--", "bash", "-c", script),
            stop=stop,
            url=f"http://{address}:8000",
            log=log,
            ready_s=ready_s,
        )
    finally:
        remove_pod(cluster, "penstock")


def restricted_pod(name: str, image: str, more: dict[str, object]) -> dict[str, object]:
    """more: of its container."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    only = {
        "name": "penstock",
        "image": image,
        "imagePullPolicy": "Never",
        "securityContext": security,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [only | more],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def await_ready(cluster: Cluster, name: str) -> None:
    cluster.kubectl(
        "wait",
        "-n",
        NAMESPACE,
        "--for=condition=Ready",
        "pod",
        name,
        f"--timeout={START_S:.0f}s",
        timeout_s=START_S + 10,
    )


def remove_pod(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "--ignore-not-found", name, timeout_s=2 * GRACE_S)


def test_it_answers_a_request(running: Running, record_property: Callable[[str, object], None]) -> None:
    answer = json.loads(_said(*running.request(max_tokens=16)))

    assert "Paris" in answer["choices"][0]["message"]["content"]
    record_property("ready_s", round(running.ready_s, 1))
    kilobytes = re.findall(r"Pss: +(\d+) kB", running.inside("cat /proc/[0-9]*/smaps_rollup 2>/dev/null || true"))
    record_property("idle_pss_mb", round(sum(map(int, kilobytes)) / 1000))


def test_no_process_of_it_is_root(running: Running) -> None:
    users = re.findall(r"^Uid:(.*)$", running.inside("grep -hs ^Uid: /proc/[0-9]*/status || true"), re.MULTILINE)

    assert len(users) > 3
    assert {int(user) for line in users for user in line.split()} == {UID}


def test_nothing_but_tmp_can_be_written(running: Running) -> None:
    said = running.inside(
        "for folder in / /opt /opt/venv /etc /usr/local $HOME; do touch $folder/x 2>/dev/null && echo $folder; done; "
        "grep ' / ' /proc/mounts | tail -n 1"
    )

    written, root = said.splitlines()
    assert written == "/tmp"
    assert root.split()[3].split(",")[0] == "ro"


def test_what_kuberay_calls_is_there_also_for_a_login_shell(running: Running) -> None:
    look_up = (
        "for tool in bash wget ray serve python penstock penstock-loadtest; do command -v $tool >/dev/null || echo no "
        "$tool; done"
    )

    assert running.inside(f"{look_up}; bash -lc '{look_up}'") == ""


def test_serve_can_import_it_and_its_kernels_were_built_ahead(running: Running) -> None:
    said = running.inside(
        "for tool in cc gcc c++ g++ clang zig; do command -v $tool; done; python -m ziglang version 2>/dev/null; "
        "python -c 'import penstock.router.app, penstock.workers.replica; "
        "from penstock.workers.compute.kernels.build import load_kernels; print(load_kernels().path); "
        "from penstock.prefix.native.build import load_library; print(load_library().path); "
        "from penstock.router.routing.native.build import load_library; print(load_library().path)'"
    )

    kernels, index, choice = said.splitlines()
    assert re.fullmatch(r"/opt/penstock/penstock/workers/compute/kernels/prebuilt/x86_64_v\d\.so", kernels)
    assert index == "/opt/penstock/penstock/prefix/native/prebuilt/x86_64.so"
    assert choice == "/opt/penstock/penstock/router/routing/native/prebuilt/x86_64.so"


def test_told_to_stop_it_finishes_its_answers_first(running: Running) -> None:
    """The last one: nothing runs afterwards."""
    started = time.monotonic()
    _said(*running.request(max_tokens=32, ignore_eos=True))
    tokens = int(32 / (time.monotonic() - started) * ANSWER_S)
    with subprocess.Popen(
        running.request(max_tokens=tokens, ignore_eos=True, stream=True), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        first = client.stdout.readline()
        stopper = Thread(target=running.stop)
        stopper.start()
        events = [line.removeprefix("data: ") for line in (first + client.stdout.read()).splitlines() if line]
        was_told = "stopping" in running.log.read_text(encoding="utf-8")
        stopper.join()

    assert was_told
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert running.log.read_text(encoding="utf-8").splitlines()[-1] == "stopped"


def test_ray_starts_in_it_as_kuberay_starts_it(cluster: Cluster, image: str) -> None:
    probe = {
        "exec": {"command": ["bash", "-c", RAY_HEALTH]},
        "periodSeconds": 2,
        "timeoutSeconds": 5,
        "failureThreshold": 60,
    }
    cluster.apply(
        restricted_pod(
            "head", image, {"command": ["/bin/bash", "-c", "--"], "args": [RAY_HEAD], "readinessProbe": probe}
        )
    )
    try:
        await_ready(cluster, "head")

        said = cluster.kubectl("exec", "-n", NAMESPACE, "head", "--", "python", "-c", RAY_TASK)
        assert said.splitlines()[-1] == f"{UID} penstock.workers.replica"
    finally:
        remove_pod(cluster, "head")


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, timeout=240, check=False, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
