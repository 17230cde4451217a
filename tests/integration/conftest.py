"""Fixtures of the integration tests: a client of the running platform, and what answers are compared with."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest

from bench.support.platform_process import PlatformProcess
from penstock.text.source import ModelSource, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture
def client(platform: PlatformProcess) -> Iterator[openai.OpenAI]:
    """The unmodified `openai` client of the module's platform."""
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def torch_threads() -> Iterator[None]:
    """Torch's number of threads is afterwards what it was; a runner sets it for the process."""
    import torch  # noqa: PLC0415 it takes a second, and most of these tests leave it to other processes

    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve("demo")


@pytest.fixture(scope="module")
def oracle(source: ModelSource) -> "PreTrainedModel":
    """The demo model as transformers computes it, in float32."""
    from bench.parity import load_oracle  # noqa: PLC0415 transformers takes seconds

    return load_oracle(source)
