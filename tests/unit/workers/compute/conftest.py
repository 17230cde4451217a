"""Fixtures of the tests that compute with torch."""

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from penstock.text.source import ModelSource
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from tests.unit.workers.built_kernels import built_kernels
from tests.unit.workers.tiny_models import saved, tiny_model


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Threads that wait for each other at every tiny product take a hundred times as long on a busy machine."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def kernels() -> Library:
    return built_kernels()


@pytest.fixture
def portable(kernels: Library) -> Iterator[None]:
    """Products in float32."""
    assert kernels.matmul.set_level(Level.PORTABLE)
    yield
    kernels.matmul.set_level(None)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A random Llama of two layers, as transformers builds it."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def source(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """`model` as a checkpoint on disk."""
    return saved(model, tmp_path_factory.mktemp("tiny"))
