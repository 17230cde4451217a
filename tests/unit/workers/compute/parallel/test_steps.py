"""A runner whose model is in parts, each in a process: the same answers as of a whole one, whatever they take, and an
end when a part is lost."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from bench.support.cpu import is_alive
from penstock.adapters.store import digest_of
from penstock.base.errors import ConfigError
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import build_batch
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.lora import LoraAdapter
from penstock.workers.compute.memory import HostMeter
from penstock.workers.compute.model_config import read_config
from penstock.workers.compute.parallel.messages import Compute, Poison
from penstock.workers.compute.parallel.part import PartPlan
from penstock.workers.compute.parallel.ranks import Ranks
from penstock.workers.compute.parallel.steps import ParallelStepModel
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import SpeculationConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.compute.parallel.engine_runs import Parts, ask, config, prompt, run, search
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.paged_hash import make_sequence
from tests.unit.workers.tiny_models import BLOCK_SIZE, saved, tiny_model

pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.timeout(180)]

SIZES = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
"""The demo model's heads."""
PATIENCE_S = 60.0


def uneven_model() -> PreTrainedModel:
    return tiny_model("llama", **SIZES)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return saved(uneven_model(), tmp_path_factory.mktemp("uneven"))


@pytest.fixture(scope="module")
def parts(uneven: ModelSource) -> Iterator[Parts]:
    found = Parts(uneven, 2, "ngram")
    yield found
    found.runner.close()
    assert found.losses.empty()
    assert all(process.poll() is not None for process in found.processes())


@pytest.fixture(scope="module")
def whole(uneven: ModelSource) -> TorchRunner:
    return load_runner(uneven, config(1, "ngram"), poison=True)


def requests() -> list[Sequence]:
    """Everything that takes something else of a step: greedy, drawn, with log probabilities, of prompts too."""
    return [
        ask(40, 1),
        ask(17, 2, temperature=0.9, seed=5, top_p=0.9),
        ask(23, 3, temperature=1.3, seed=6, top_k=7, frequency_penalty=0.5, logprobs=3),
        ask(31, 4, max_tokens=3, prompt_logprobs=2),
        ask(9, 5, logit_bias=((5, 2.0),)),
    ]


def test_answers_are_those_of_the_whole_model(parts: Parts, whole: TorchRunner) -> None:
    assert run(parts.runner, *requests()) == run(whole, *requests())


def test_log_probabilities_of_prompts_are_those_of_the_whole_model(parts: Parts, whole: TorchRunner) -> None:
    mine, theirs = ask(31, 4, prompt_logprobs=2), ask(31, 4, prompt_logprobs=2)
    run(parts.runner, mine, ask(12, 8))
    run(whole, theirs)

    for ours, other in zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True):
        assert torch.frombuffer(bytearray(ours.logprobs), dtype=torch.float32).allclose(
            torch.frombuffer(bytearray(other.logprobs), dtype=torch.float32), atol=1e-4
        )


def test_beams_copy_blocks_on_every_rank(parts: Parts, whole: TorchRunner) -> None:
    """Blocks that nobody wrote are NaN, so a copy that a rank missed would show."""
    found = [search(runner, ask(14, 7, num_beams=3, num_returned=3)) for runner in (parts.runner, whole)]

    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_drafts_are_verified_by_all_ranks(parts: Parts, whole: TorchRunner) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    mine, theirs = (make_sequence(ChainHasher(bytes(16), BLOCK_SIZE), prompt(6, 3) * 4, params) for _ in range(2))

    assert run(parts.runner, mine) == run(whole, theirs)
    assert mine.acceptance is not None, "nothing was drafted"


def test_adapters_are_loaded_into_all_ranks_and_dropped_again(
    parts: Parts, whole: TorchRunner, uneven: ModelSource, tmp_path: Path
) -> None:
    outputs: list[list[list[int]]] = []
    adapted(uneven_model(), tmp_path / "one", seed=1, size=0.4)
    for runner in (parts.runner, whole):
        adapter = runner.load_adapter(digest_of(tmp_path / "one"), tmp_path / "one", 16)
        assert isinstance(adapter, LoraAdapter)
        outputs.append(run(runner, ask(20, 1, adapter=adapter), ask(20, 1), ask(11, 2, adapter=adapter)))
        del adapter

    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]
    assert not parts.steps._keys
    assert len(parts.steps._dropped) == 1


def test_an_adapter_that_does_not_fit_is_refused_by_all(parts: Parts, tmp_path: Path) -> None:
    adapted(tiny_model("llama"), tmp_path / "other", seed=1)

    with pytest.raises(InvalidRequest):
        parts.runner.load_adapter(digest_of(tmp_path / "other"), tmp_path / "other", 16)
    adapted(uneven_model(), tmp_path / "large", seed=1, rank=8)
    with pytest.raises(InvalidRequest, match="rank"):
        parts.runner.load_adapter(digest_of(tmp_path / "large"), tmp_path / "large", 4)
    assert run(parts.runner, ask(8, 1, max_tokens=2))


def test_a_step_that_fails_on_all_ranks_alike_is_followed_by_others(parts: Parts, whole: TorchRunner) -> None:
    seq = ask(6, 1)
    seq.block_table = [0, 1]
    batch = build_batch(Step([Chunk(seq, 0, 6)], []), BLOCK_SIZE)
    beyond = replace(batch, positions=batch.positions + 100_000)

    with torch.inference_mode(), pytest.raises(IndexError):
        parts.steps.logits(beyond, [])
    assert run(parts.runner, ask(20, 2)) == run(whole, ask(20, 2))


def test_four_ranks_share_three_key_value_heads(uneven: ModelSource, whole: TorchRunner) -> None:
    four = Parts(uneven, 4)
    try:
        assert run(four.runner, *requests()) == run(whole, *requests())
    finally:
        four.runner.close()


def test_a_killed_rank_is_told_and_steps_raise_instead_of_waiting(uneven: ModelSource) -> None:
    found = Parts(uneven, 2)
    try:
        run(found.runner, ask(8, 1, max_tokens=2))
        os.kill(found.processes()[0].pid, signal.SIGKILL)

        sentence = found.losses.get(timeout=PATIENCE_S)
        assert sentence.startswith("Rank 1 of 2 has ended (exit status -9)")
        with pytest.raises(Exception, match=r"(?i)rank|connection|peer"):
            run(found.runner, ask(8, 1, max_tokens=2))
    finally:
        found.runner.close()


def test_a_rank_that_fails_alone_is_lost(uneven: ModelSource) -> None:
    """An adapter that it was never told of."""
    found = Parts(uneven, 2)
    try:
        found.steps._ranks.send(Compute(7, (torch.zeros(1).numpy(),) * 7, [(99, None)], False, False, []))  # type: ignore[arg-type]

        assert found.losses.get(timeout=PATIENCE_S) == "Step 7 failed on rank 1 of 2 alone."
    finally:
        found.runner.close()


def test_ranks_measure_together_how_many_blocks_have_room_on_each(uneven: ModelSource, whole: TorchRunner) -> None:
    meter = HostMeter()
    share = 2 * (meter.used() + 200 * 2**20) / meter.total()
    settings = msgspec.structs.replace(config(2, "ngram"), kv_memory_bytes="auto", memory_share=share)
    runner = load_runner(uneven, settings)
    try:
        steps = runner._steps
        assert isinstance(steps, ParallelStepModel)
        assert runner.num_blocks == steps.cache.num_blocks > 200
        assert runner.max_model_len == steps.max_model_len == 256
        assert run(runner, ask(40, 3), ask(9, 4)) == run(whole, ask(40, 3), ask(9, 4))
    finally:
        runner.close()


def test_an_order_that_is_no_step_must_not_fail_either(uneven: ModelSource) -> None:
    found = Parts(uneven, 2)
    try:
        found.steps._ranks.send(Poison(torch.tensor([10**6]).numpy()))  # type: ignore[arg-type]

        assert found.losses.get(timeout=PATIENCE_S).startswith("Rank 1 of 2 failed: IndexError")
    finally:
        found.runner.close()


class Meeting:
    """Rank 1 of 2, without a rank 0 that computes."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        model, engine = read_config(source), config(2)
        self.meeting = folder / "meeting"
        self.losses: queue.SimpleQueue[str] = queue.SimpleQueue()
        plan = PartPlan(
            source, model, engine, False, torch.float32, torch.float32, 0, 50, 200, 1, self.meeting
        )  # fmt: skip
        self.ranks = Ranks(plan, self.losses.put)
        self.ranks.wait_built(1)


def test_ranks_meet_only_when_all_have_their_weights(uneven: ModelSource, tmp_path: Path) -> None:
    """A rank that came earlier would wait for one that still reads, and give up after engine.stall_s."""
    found = Meeting(uneven, tmp_path)

    found.ranks.close()

    assert not found.meeting.exists()


def test_a_rank_lost_while_all_meet_is_told_though_rank_0_waits_for_it(uneven: ModelSource, tmp_path: Path) -> None:
    found = Meeting(uneven, tmp_path)
    try:
        found.ranks.meet()

        found.ranks._processes[0].kill()

        assert found.losses.get(timeout=PATIENCE_S).startswith("Rank 1 of 2 has ended (exit status -9)")
        with pytest.raises(ConfigError, match="Rank 1 of 2 has ended"):
            found.ranks.check()
    finally:
        found.ranks.close()
    assert found.losses.empty()


SCRIPT = """
import sys
import threading
from pathlib import Path
import msgspec
from penstock.text.source import ModelSource
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
if __name__ == "__main__":
    config = EngineConfig(dtype="float32", threads=2, tensor_parallel_size=2, kv_memory_bytes=2**20)
    runner = load_runner(ModelSource("safetensors", Path(sys.argv[1]), "tiny"), config)
    print("serving", runner._steps._ranks._processes[0].pid, flush=True)
    threading.Event().wait()
"""


class Replica:
    """A process that has loaded a model in parts, as a replica does."""

    def __init__(self, source: ModelSource) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(source.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.rank = psutil.Process(int(self.process.stdout.readline().split()[1]))

    def close(self) -> tuple[str, int]:
        """Standard error and the exit status."""
        _, error = self.process.communicate(timeout=PATIENCE_S)
        return error, self.process.returncode


def test_a_replica_ends_with_a_sentence_when_a_rank_is_killed(uneven: ModelSource) -> None:
    replica = Replica(uneven)

    replica.rank.kill()

    error, status = replica.close()
    assert status == 1
    assert "Rank 1 of 2 has ended (exit status -9), and with it the model is no longer whole." in error


def test_ranks_end_when_their_replica_is_killed(uneven: ModelSource) -> None:
    replica = Replica(uneven)

    replica.process.kill()

    replica.close()
    until_s = time.monotonic() + PATIENCE_S
    while is_alive(replica.rank):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_model_with_too_few_heads_is_refused_before_anything_is_started(uneven: ModelSource) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: 16 is too much for the checkpoint's 9"):
        load_runner(uneven, config(16))


def test_a_draft_model_that_is_the_pools_own_is_refused(uneven: ModelSource) -> None:
    speculation = SpeculationConfig(method="draft", model=str(uneven.path))

    with pytest.raises(ConfigError, match="name another model, or method: ngram"):
        load_runner(uneven, msgspec.structs.replace(config(2), speculation=speculation))
