"""Random schedules with a draft head and without: arrivals, chunks, prefix hits, preemptions, cancelled sequences,
draft lengths. Whatever happens, each sequence gets the tokens that it gets alone.

10,000 schedules with PENSTOCK_TEST_FULL; they take some minutes.
"""

import random
from functools import cache

import pytest
import torch

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.compute.kernels.decoder import Activations
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.fused import FusedLlama, make_cache
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.head import HeadDrafter
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import NO_COSTS, Scheduler
from penstock.workers.engine.sequence import Sequence
from tests.integration.sizes import full
from tests.unit.workers.built_kernels import built_kernels
from tests.unit.workers.compute.speculation.tiny_heads import random_head, random_target

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB, MAX_LEN, BLOCK = 29, 96, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=2, num_kv_heads=1,
    head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({3}),
)  # fmt: skip
HASHER = ChainHasher(b"head-schedules-secret", BLOCK)
ROOT = HASHER.root("tiny")
NUM_SCHEDULES = full(10_000, 60)
COSTS = tuple(StepCosts(base_s=0.01, draft_token_s=token_s, draft_round_s=0.0002) for token_s in (0.001, 0.003))
"""Costs with which a token needs a chance of a tenth or a third to be verified."""
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
)


class Rig:
    def __init__(
        self,
        kernels: Library,
        num_blocks: int,
        max_tokens: int,
        *,
        has_head: bool,
        max_drafts: int,
        costs: StepCosts = NO_COSTS,
        rng: random.Random | None = None,
    ) -> None:
        """rng: by which steps are not observed; None: all are."""
        self.costs, self.rng = costs, rng
        self.is_resting = False
        self.num_unsure = 0
        """Drafts of which a token was left out because it had little chance."""
        target, sampler = _target(kernels), Sampler(VOCAB, CONFIG.eos_token_ids)
        head = HeadDrafter(
            random_head(CONFIG, 8, own_vocab=24), target, num_blocks, BLOCK, torch.bfloat16, sampler, kernels, 1
        )
        cache = make_cache(target, num_blocks, BLOCK, torch.bfloat16)
        drafter = head if has_head else None
        self.head = head
        self.runner = TorchRunner(HostStepModel(target, cache), sampler, MAX_LEN, drafter, observer=drafter)
        config = EngineConfig(
            block_size=BLOCK,
            max_num_seqs=4,
            max_batched_tokens=max_tokens,
            speculation=SpeculationConfig(method="head", head="tiny", max_draft_tokens=max_drafts)
            if has_head
            else SpeculationConfig(),
        )
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, HASHER, config, MAX_LEN, CONFIG.eos_token_ids)
        self.poison()

    def poison(self) -> None:
        garbage = list(self.pool.garbage())
        self.runner.poison(garbage)
        self.head.poison(torch.tensor(garbage, dtype=torch.int64))

    def step(self) -> None:
        step = self.scheduler.schedule(self.costs)
        if self.rng is not None and self.rng.random() < 0.1:
            self.is_resting = not self.is_resting
        if self.is_resting:
            for chunk in step.chunks:
                chunk.is_observed = False
        sampled = self.runner.launch(step)()
        self.num_unsure += sum((chunk.num_rounds or 0) > len(chunk.draft or ()) for chunk in step.chunks)
        for output in self.scheduler.commit(step, sampled):
            if output.finish is not None:
                self.runner.forget(output.seq)
        self.poison()
        self.pool.check(self.scheduler.running)


@cache
def _target(kernels: Library) -> FusedLlama:
    return random_target(CONFIG, kernels, 0.3, Activations.BFLOAT16)[0]


def make_sequence(number: int) -> Sequence:
    """One of sixty, by its number."""
    rng = random.Random(number)
    shared = random.Random(number % 3).choices(range(4, VOCAB), k=rng.choice((0, 16, 34)))
    prompt = shared + rng.choices(range(4, VOCAB), k=rng.randint(1, 20))
    keys = HASHER.extend(ROOT, prompt)
    sampling = SamplingParams(max_tokens=rng.randint(1, 24), seed=number, ignore_eos=True, **SAMPLINGS[number % 4])
    return Sequence(str(number), prompt, sampling, len(prompt), keys, keys[-1] if keys else ROOT, 0.0)


@cache
def alone(kernels: Library, number: int) -> list[int]:
    """What a sequence gets by itself, without drafts."""
    rig, seq = Rig(kernels, 8, 128, has_head=False, max_drafts=1), make_sequence(number)
    rig.scheduler.add(seq)
    while rig.scheduler.has_work:
        rig.step()
    return seq.token_ids


@pytest.mark.timeout(1800)
def test_every_sequence_gets_its_tokens_whatever_the_schedule() -> None:
    kernels = built_kernels()
    drafted = accepted = preempted = found = unsure = 0
    for schedule in range(NUM_SCHEDULES):
        rng = random.Random(schedule)
        rig = Rig(
            kernels, rng.choice((7, 9, 16)), rng.choice((5, 17, 64)), has_head=True, max_drafts=rng.randint(1, 4),
            costs=rng.choice((NO_COSTS, *COSTS)), rng=rng if schedule % 2 else None,
        )  # fmt: skip
        waiting = [make_sequence(rng.randrange(60)) for _ in range(rng.randint(2, 7))]
        seqs = list(waiting)
        while waiting or rig.scheduler.has_work:
            while waiting and (rng.random() < 0.3 or not rig.scheduler.has_work):
                rig.scheduler.add(waiting.pop())
            rig.step()
        for seq in seqs:
            assert seq.token_ids == alone(kernels, int(seq.request_id)), (schedule, seq.request_id)
        unsure += rig.num_unsure
        drafted += rig.scheduler.drafts.num_drafted
        accepted += rig.scheduler.drafts.num_accepted
        preempted += sum(seq.num_preemptions for seq in seqs)
        found += sum(bool(seq.num_cached_tokens) for seq in seqs)
    assert accepted > NUM_SCHEDULES
    assert drafted > 10 * NUM_SCHEDULES
    assert unsure > NUM_SCHEDULES, "hardly a token was left out for its chance"
    assert preempted
    assert found
