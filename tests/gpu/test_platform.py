"""The demo path on a GPU: `penstock up` with device: cuda, the unmodified openai client, Paris."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.base.errors import ConfigError
from penstock.text.source import resolve
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.gpu.cases import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cuda", reason="Triton's interpreter is no platform"),
    pytest.mark.timeout(300),
]

CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: demo
    model: demo
    served_names: [demo]
    engine: {{device: cuda, dtype: DTYPE}}
"""
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = list(range(1000, 1120))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def platform(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG.replace("DTYPE", request.param)) as running:
        yield running


def test_the_openai_client_gets_paris_from_a_gpu(platform: PlatformProcess) -> None:
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=120) as client:
        answers = [
            client.chat.completions.create(model="demo", messages=PARIS, temperature=0, max_tokens=16) for _ in range(2)
        ]

    for answer in answers:
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"


def decoded(runner: TorchRunner, num_tokens: int) -> list[int]:
    """PROMPT in two pieces, then token by token, greedily."""
    seq = Sequence(
        "r",
        list(PROMPT),
        SamplingParams(max_tokens=num_tokens, temperature=0.0),
        len(PROMPT),
        [],
        b"",
        0.0,
        block_table=list(range(20, 0, -1)),
    )
    runner.launch(Step([Chunk(seq, 0, 100)], []))()
    seq.num_computed_tokens = 100
    while seq.num_output_tokens < num_tokens:
        count = seq.num_tokens - seq.num_computed_tokens
        (chosen,) = runner.launch(Step([Chunk(seq, seq.num_computed_tokens, count)], []))()
        seq.num_computed_tokens += count
        seq.token_ids.append(chosen[0].token_id)
    return seq.token_ids[len(PROMPT) :]


def test_the_demo_model_chooses_on_the_gpu_what_it_chooses_on_the_cpu() -> None:
    config = {"dtype": "float32", "kv_memory_bytes": 64 * 2**20, "max_batched_tokens": 512}
    gpu, cpu = (
        load_runner(resolve("demo"), EngineConfig(device=device, **config), poison=True) for device in ("cuda", "cpu")
    )

    assert decoded(gpu, 24) == decoded(cpu, 24)


def test_a_cache_larger_than_the_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="that are free on the GPU"):
        load_runner(
            resolve("demo"),
            EngineConfig(
                device="cuda",
                kv_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
                max_batched_tokens=512,
            ),
        )
