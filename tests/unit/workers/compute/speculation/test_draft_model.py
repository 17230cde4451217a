"""The draft model over the target's blocks: a tiny llama that drafts for itself, so that every proposal is right unless
its KV is not."""

from functools import cache

import pytest
import torch

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.compute.weights import layout, parameter_shapes
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB, MAX_LEN, BLOCK, NUM_BLOCKS = 97, 128, 4, 24
HASHER = ChainHasher(b"draft-model-secret", BLOCK)
ROOT = HASHER.root("tiny")
CONFIG = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
    max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=True, has_qkv_bias=False, has_o_bias=False,
    has_mlp_bias=False, has_qk_norm=False, eos_token_ids=frozenset({3}),
)  # fmt: skip


@cache
def make_model() -> Llama:
    generator = torch.Generator().manual_seed(5)
    shapes = parameter_shapes(layout(CONFIG))
    return Llama(
        CONFIG,
        {
            name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
            for name, shape in shapes.items()
        },
        MAX_LEN,
        1,
        True,
    )


class Rig:
    """A scheduler over the model, which also drafts; blocks that hold nothing are NaN in both caches."""

    def __init__(self, catch_up_tokens: int = 512, num_blocks: int = NUM_BLOCKS, max_model_len: int = MAX_LEN) -> None:
        sampler = Sampler(VOCAB, CONFIG.eos_token_ids)
        self.drafter = DraftModel(
            make_model(), KvCache(CONFIG, num_blocks, BLOCK, torch.float32), sampler, max_model_len, catch_up_tokens
        )
        self.runner = TorchRunner(
            HostStepModel(make_model(), KvCache(CONFIG, num_blocks, BLOCK, torch.float32)),
            sampler,
            MAX_LEN,
            self.drafter,
        )
        config = EngineConfig(
            block_size=BLOCK,
            max_num_seqs=4,
            max_batched_tokens=64,
            speculation=SpeculationConfig(method="ngram", max_draft_tokens=3),
        )
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, HASHER, config, MAX_LEN, CONFIG.eos_token_ids)
        self.computed: list[int] = []
        """Known tokens that the drafter computed, by step."""
        self.poison()

    def poison(self) -> None:
        garbage = torch.tensor(list(self.pool.garbage()), dtype=torch.int64)
        self.runner.poison(garbage.tolist())
        self.drafter.poison(garbage)

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.runner.draft(step)
        batch, logits = self.runner.forward(step)
        for output in self.scheduler.commit(step, self.runner.choose(step, batch, logits)):
            if output.finish is not None:
                self.runner.forget(output.seq)
        self.poison()
        self.pool.check(self.scheduler.running)
        return step

    def drain(self) -> list[Step]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
        return steps

    @property
    def drafts(self) -> tuple[int, int]:
        return self.scheduler.drafts.num_drafted, self.scheduler.drafts.num_accepted


def sequence(prompt: list[int], max_tokens: int = 20, **sampling: float) -> Sequence:
    keys = HASHER.extend(ROOT, prompt)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Sequence("r", list(prompt), params, len(prompt), keys, keys[-1] if keys else ROOT, 0.0)


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * place) % VOCAB for place in range(length)]


def drafts_of(step: Step) -> list[int]:
    return [len(chunk.draft or ()) for chunk in step.chunks]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "seed": 2},
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(sampling: dict[str, float]) -> None:
    rig = Rig()
    rig.scheduler.add(sequence(prompt_of(9), 30, **sampling))
    rig.scheduler.add(sequence(prompt_of(14, 5), 30, **sampling))
    steps = rig.drain()

    drafted, accepted = rig.drafts
    assert drafted == accepted > 40
    assert len(steps) < 12


def test_a_prompt_longer_than_it_may_catch_up_with_is_drafted_for_some_steps_later() -> None:
    rig = Rig(catch_up_tokens=8)
    rig.scheduler.add(sequence(prompt_of(20), 30, temperature=0.0))
    steps = rig.drain()

    assert [drafts_of(step) for step in steps[:4]] == [
        [0],
        [0],
        [0],
        [3],
    ]  # 20, 21, 22 and 23 tokens known; 8, 16 and 24 at most computed
    assert rig.drafts[0] == rig.drafts[1]


def test_a_prefix_whose_draft_kv_is_there_is_not_computed_again() -> None:
    rig = Rig(catch_up_tokens=9)
    first = sequence(prompt_of(16), 9, temperature=0.0)
    rig.scheduler.add(first)
    rig.drain()
    again = sequence([*prompt_of(16), 1, 2, 3], 9, temperature=0.0)
    rig.scheduler.add(again)
    rig.step()

    assert again.num_cached_tokens == 16
    assert drafts_of(rig.step()) == [
        3
    ]  # 4 of 20 tokens were to be caught up with: more than 9 would have taken another step
    rig.drain()
    assert rig.drafts[0] == rig.drafts[1]


def test_a_prefix_computed_without_draft_kv_is_caught_up_with_and_then_flagged() -> None:
    rig = Rig(catch_up_tokens=12)
    silent = sequence(prompt_of(16), 1, temperature=0.0)  # its only token leaves no place for a draft
    rig.scheduler.add(silent)
    rig.drain()
    follower = sequence([*prompt_of(16), 1, 2, 3], 14, temperature=0.0)
    rig.scheduler.add(follower)
    rig.step()

    assert follower.num_cached_tokens == 16
    assert [drafts_of(rig.step()) for _ in range(2)] == [[0], [3]]  # all 20 tokens, 12 a step
    rig.drain()
    assert rig.drafts[0] == rig.drafts[1] > 0
    third = sequence([*prompt_of(16), 4, 5, 6], 14, temperature=0.0)
    rig.scheduler.add(third)
    rig.step()
    assert drafts_of(rig.step()) == [3]


def test_a_block_that_was_given_to_another_chain_meanwhile_is_not_taken_for_the_old_one() -> None:
    rig = Rig(num_blocks=8)
    rig.scheduler.add(sequence(prompt_of(12), 8, temperature=0.0))
    rig.drain()
    for first in range(1, 4):  # each needs most of the pool; none of them drafts
        rig.scheduler.add(sequence(prompt_of(28, first), 1, temperature=0.0))
        rig.drain()
    rig.scheduler.add(sequence(prompt_of(12), 8, temperature=0.0))
    rig.drain()

    assert rig.drafts[0] == rig.drafts[1] > 0


def test_after_a_preemption_it_starts_over_in_the_new_blocks() -> None:
    rig = Rig(num_blocks=12)
    old, new = sequence(prompt_of(14), 26, temperature=0.0), sequence(prompt_of(14, 9), 20, temperature=0.0)
    rig.scheduler.add(old)
    rig.scheduler.add(new)
    rig.drain()

    assert new.num_preemptions > 0
    assert rig.drafts[0] == rig.drafts[1] > 0


def test_nothing_is_drafted_beyond_what_the_draft_model_can_place() -> None:
    rig = Rig(max_model_len=20)
    seq = sequence(prompt_of(12), 20, temperature=0.0)
    rig.scheduler.add(seq)
    steps = rig.drain()

    assert max(chunk.end + len(chunk.draft or ()) for step in steps for chunk in step.chunks if chunk.draft) == 20
    assert drafts_of(steps[-2]) == [0]


def test_an_ended_sequence_leaves_nothing() -> None:
    rig = Rig()
    seq = sequence(prompt_of(9), 12, temperature=0.0)
    rig.scheduler.add(seq)
    rig.drain()

    assert rig.drafter._states == {}
    rig.drafter.forget(seq)


def test_draft_kv_that_is_not_there_would_show() -> None:
    """Guards the tests above: they rely on NaN ending a draft."""
    rig = Rig()
    seq = sequence(prompt_of(9), 30, temperature=0.0)
    rig.scheduler.add(seq)
    rig.step()
    rig.step()
    rig.drafter.poison(torch.tensor(seq.block_table[:1]))

    assert drafts_of(rig.step()) == [0]
    assert rig.drafter.propose([Chunk(seq, seq.num_tokens - 1, 1, 0)]) == [[]]
