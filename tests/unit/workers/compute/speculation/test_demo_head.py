"""The head that comes with Penstock: it fits the demo model, is small, and is right often enough to be of use, with the
same answers."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.speculation.head_file import read_head
from penstock.workers.compute.speculation.plan import DEMO_HEAD, plan_head
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.offline import OfflineEngine
from tests.unit.workers.built_kernels import built_kernels

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a robot who learns to paint.",
    "If a train goes 60 miles in an hour, how far does it go in three and a half hours?",
)


@pytest.fixture(autouse=True)
def same_torch_threads() -> Iterator[None]:
    """Loading sets the process's number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_fits_the_demo_model_and_is_small() -> None:
    head = read_head(DEMO_HEAD)
    head.spec.check_fits(read_config(resolve("demo")))
    assert head.spec.trained_tokens > 2_000_000
    assert DEMO_HEAD.stat().st_size <= 12 * 2**20


def test_without_kernels_there_are_no_drafts_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A pool that names a head starts all the same; one whose settings rule the kernels out is refused."""
    source = resolve("demo")
    config = read_config(source)
    speculation = SpeculationConfig(method="head", head="demo")
    assert plan_head(source, config, EngineConfig(speculation=speculation), is_fused=False, has_kernels=False) is None
    assert "this machine does not have" in caplog.text
    for settings in (EngineConfig(speculation=speculation, exact=True), EngineConfig(speculation=speculation)):
        with pytest.raises(ConfigError, match="needs the CPU kernels"):
            plan_head(source, config, settings, is_fused=False, has_kernels=not settings.exact)


def test_it_is_known_as_the_demo_model_s_and_no_other_s(caplog: pytest.LogCaptureFixture) -> None:
    source = resolve("demo")
    config = read_config(source)
    engine = EngineConfig(speculation=SpeculationConfig(method="head", head="demo"))
    for name, is_same in (
        (source.name, True),
        (f"{source.name}.Q4_1", True),
        (f"{source.name}-IQ3_XXS", True),
        ("Other-135M.Q4_1", False),
        ("SmolLM2-135M", False),
    ):
        caplog.clear()
        assert plan_head(replace(source, name=name), config, engine, is_fused=True, has_kernels=True) is not None
        assert ("may agree with it less often" not in caplog.text) == is_same, name


def test_it_says_many_of_the_demo_model_s_tokens() -> None:
    built_kernels()
    source = resolve("demo")
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]

    def answer(speculation: SpeculationConfig) -> tuple[list[list[int]], int, int]:
        config = EngineConfig(
            max_num_seqs=2, max_batched_tokens=128, threads=1, kv_memory_bytes=1 << 25, speculation=speculation
        )
        found = []
        with OfflineEngine(load_runner(source, config), config) as engine:
            for number, prompt in enumerate(prompts):
                engine.submit(str(number), prompt, SamplingParams(max_tokens=48))
                found.append(engine.wait().token_ids[len(prompt) :])
            assert engine.load is not None
            return found, engine.load.num_drafted, engine.load.num_accepted

    plain, _, _ = answer(SpeculationConfig())
    drafted, num_drafted, num_accepted = answer(
        SpeculationConfig(method="head", head="demo", max_draft_tokens=2, adaptive=False)
    )
    assert drafted == plain
    num_tokens = sum(map(len, plain))
    assert num_drafted > num_tokens
    assert num_accepted > 0.25 * num_tokens
