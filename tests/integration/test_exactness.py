"""Invariants 2 and 3 in exact mode, bit for bit: whatever runs beside a sequence, and whatever drafts for it, it gets
the logits and tokens it gets alone."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.models.llama import KvCache, Llama
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation.draft_model import DraftModel
from penstock.workers.compute.speculation.drafter import Drafter
from penstock.workers.compute.speculation.ngram import NgramDrafter
from penstock.workers.compute.step_model import HostStepModel
from penstock.workers.compute.weights import layout, parameter_shapes
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence

VOCAB, MAX_LEN, BLOCK, THREADS = 211, 160, 8, 2
HASHER = ChainHasher(b"exactness-secret", BLOCK)
ROOT = HASHER.root("tiny")
MODELS = {"llama": torch.float32, "qwen3": torch.float32, "qwen2": torch.bfloat16}
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_k": 30, "frequency_penalty": 0.5, "min_tokens": 3},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": ((7, 1.0),)},
]


@dataclass(frozen=True)
class Request:
    prefix: int
    """Index of a shared beginning, and the number of its tokens that are taken."""
    prefix_len: int
    tail: tuple[int, ...]
    max_tokens: int
    sampling: int
    seed: int
    arrival: int
    """Step before which it is added."""
    abort: int | None
    """Steps after its arrival, at which it is aborted if it still runs."""

    @property
    def prompt(self) -> list[int]:
        return [(31 * self.prefix + 7 * index) % VOCAB for index in range(self.prefix_len)] + list(self.tail)

    def sequence(self) -> Sequence:
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.seed, **SAMPLINGS[self.sampling])
        keys = HASHER.extend(ROOT, self.prompt)
        return Sequence("r", self.prompt, params, len(self.prompt), keys, keys[-1] if keys else ROOT, 0.0)


@dataclass
class Trace:
    """What a sequence was given: tokens, and the logits each was chosen from."""

    seq: Sequence
    logits: list[Tensor] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.seq.token_ids[self.seq.num_prompt_tokens :]


@pytest.fixture(scope="module", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Two threads that wait for each other at every tiny product are a hundred times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Adversary:
    """Guesses anything, now and then what was said before."""

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        found = []
        for chunk in chunks:
            rng = random.Random(chunk.seq.num_tokens)
            found.append(
                [
                    rng.choice((rng.randrange(VOCAB), *chunk.seq.token_ids[-3:]))
                    for _ in range(rng.randint(0, chunk.max_drafts))
                ]
            )
        return found

    def forget(self, seq: Sequence) -> None:
        """Do nothing: this drafter keeps no state."""


DRAFTERS = ("none", "ngram", "adversary", "looked up", "first layer", "oracle")
"""looked up: what the scheduler looks up itself, as beside a draft head, and the adversary where it finds nothing."""


@cache
def make_model(family: str, num_layers: int = 2) -> Llama:
    config = ModelConfig(
        family=family, vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=6,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, has_rope_factors=False,
        max_position_embeddings=MAX_LEN, sliding_window=None, is_tied=family == "llama",
        has_qkv_bias=family == "qwen2", has_o_bias=False, has_mlp_bias=False, has_qk_norm=family == "qwen3",
        eos_token_ids=frozenset({3}),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    shapes = parameter_shapes(layout(config))
    # wide enough that attention, not the last token alone, decides the next one
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }
    config = replace(config, num_layers=num_layers)
    return Llama(
        config, {name: weight.to(MODELS[family]) for name, weight in weights.items()}, MAX_LEN, THREADS, exact=True
    )


class Rig:
    """Scheduler and runner, with NaN in every block that nobody holds and no key names."""

    def __init__(
        self,
        family: str,
        num_blocks: int,
        max_batched_tokens: int,
        max_num_seqs: int,
        drafter: str = "none",
        max_draft_tokens: int = 4,
    ) -> None:
        model = make_model(family)
        if drafter == "looked up":
            speculation = SpeculationConfig(method="head", head="demo", max_draft_tokens=max_draft_tokens)
        else:
            method: Literal["none", "ngram"] = "none" if drafter == "none" else "ngram"
            speculation = SpeculationConfig(method=method, max_draft_tokens=max_draft_tokens)
        config = EngineConfig(
            block_size=BLOCK,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            exact=True,
            speculation=speculation,
        )
        eos = model.config.eos_token_ids
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.pool, HASHER, config, MAX_LEN, eos)
        sampler = Sampler(VOCAB, eos)
        self.draft_model: DraftModel | None = None
        if drafter in ("first layer", "oracle"):
            layers = make_model(family, 1 if drafter == "first layer" else 2)
            self.draft_model = DraftModel(
                layers, KvCache(layers.config, num_blocks, BLOCK, MODELS[family]), sampler, MAX_LEN, catch_up_tokens=21
            )
        others: dict[str, Drafter] = {
            "ngram": NgramDrafter(shortest=1),
            "adversary": Adversary(),
            "looked up": Adversary(),
        }
        self.runner = TorchRunner(
            HostStepModel(model, KvCache(model.config, num_blocks, BLOCK, MODELS[family])),
            sampler,
            MAX_LEN,
            self.draft_model or others.get(drafter),
        )
        self.traces: dict[Sequence, Trace] = {}
        self.num_looked_up = 0
        self.poison()

    def poison(self) -> None:
        garbage = list(self.pool.garbage())
        self.runner.poison(garbage)
        if self.draft_model is not None:
            self.draft_model.poison(torch.tensor(garbage, dtype=torch.int64))

    @property
    def num_drafted_and_accepted(self) -> tuple[int, int]:
        drafts = self.scheduler.drafts
        return drafts.num_drafted, drafts.num_accepted

    def add(self, seq: Sequence) -> Trace:
        self.traces[seq] = Trace(seq)
        self.scheduler.add(seq)
        return self.traces[seq]

    def abort(self, seq: Sequence) -> None:
        self.scheduler.finish(seq, Finish.ABORT)
        self.runner.forget(seq)
        self.poison()

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.num_looked_up += sum(chunk.num_matched > 0 for chunk in step.chunks)
        self.runner.draft(step)
        batch, logits = self.runner.forward(step)
        sampled = self.runner.choose(step, batch, logits)
        rows = iter(logits)
        of_chunks = [[next(rows) for _ in range(1 + len(step.chunks[index].draft or ()))] for index in batch.sampled]
        for output, mine in zip(self.scheduler.commit(step, sampled), of_chunks, strict=True):
            self.traces[output.seq].logits += mine[: max(1, len(output.token_ids))]
            if output.finish is not None:
                self.runner.forget(output.seq)
        self.poison()
        self.pool.check(self.scheduler.running)


@cache
def run_alone(family: str, request: Request) -> Trace:
    rig = Rig(family, num_blocks=MAX_LEN // BLOCK, max_batched_tokens=MAX_LEN, max_num_seqs=1)
    trace = rig.add(request.sequence())
    while rig.scheduler.has_work:
        rig.step()
    return trace


def run_together(rig: Rig, requests: list[Request]) -> list[Trace]:
    traces: list[Trace] = []
    pending = sorted(requests, key=lambda request: request.arrival)
    aborts: dict[int, list[Sequence]] = {}
    step = 0
    while pending or rig.scheduler.has_work:
        while pending and pending[0].arrival <= step:
            request = pending.pop(0)
            traces.append(rig.add(request.sequence()))
            if request.abort is not None:
                aborts.setdefault(step + request.abort, []).append(traces[-1].seq)
        for seq in aborts.pop(step, []):
            rig.abort(seq)
        if rig.scheduler.has_work:
            rig.step()
        step += 1
    return traces


requests = st.builds(
    Request,
    prefix=st.integers(0, 2),
    prefix_len=st.sampled_from((0, 16, 17, 40, 40)),
    tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple),
    max_tokens=st.sampled_from((1, 7, 20, 36, 36)),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    seed=st.integers(0, 3),
    arrival=st.integers(0, 8),
    abort=st.none() | st.none() | st.integers(0, 15),
)


@pytest.mark.parametrize("family", MODELS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.lists(requests, min_size=3, max_size=7),
    num_blocks=st.sampled_from((12, 14, 18)),
    max_num_seqs=st.sampled_from((2, 4, 7)),
    extra_budget=st.sampled_from((0, 1, 5, 16, 100)),
    drafter=st.sampled_from(DRAFTERS),
    max_draft_tokens=st.sampled_from((4, 1, 7)),
)
def test_a_sequence_gets_the_same_bits_beside_any_others_with_any_drafter(
    family: str,
    batch: list[Request],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    drafter: str,
    max_draft_tokens: int,
) -> None:
    rig = Rig(family, num_blocks, max_num_seqs + extra_budget, max_num_seqs, drafter, max_draft_tokens)
    traces = run_together(rig, batch)

    for trace, request in zip(traces, sorted(batch, key=lambda request: request.arrival), strict=True):
        alone = run_alone(family, request)
        count = len(trace.output)
        event("preempted" if trace.seq.num_preemptions else "never preempted")
        event("prefix hit" if trace.seq.num_cached_tokens else "no prefix hit")
        event(str(trace.seq.finish))
        assert trace.seq.finish is Finish.ABORT or count == len(alone.output)
        assert trace.output == alone.output[:count]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(trace.logits, alone.logits[:count], strict=True))
        assert not any(row.isnan().any() for row in trace.logits)
    assert rig.pool.num_free == num_blocks
    drafted, accepted = rig.num_drafted_and_accepted
    event(f"{drafter}: {'accepted' if accepted else 'nothing accepted'}")
    assert drafter != "oracle" or drafted == accepted


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption_prefix_hits_chunks_and_drafts_happen_and_change_nothing(family: str, drafter: str) -> None:
    """What the random schedules may miss, forced: more than the pool holds, and a late comer that finds a prefix."""
    batch = [
        Request(0, 40, (5, 6, index), 30, index % len(SAMPLINGS), index, 2 * (index == 4) + 60 * (index == 5), None)
        for index in range(6)
    ]
    rig = Rig(family, num_blocks=14, max_batched_tokens=12, max_num_seqs=6, drafter=drafter)
    traces = run_together(rig, batch)

    assert any(trace.seq.num_preemptions for trace in traces)
    assert any(trace.seq.num_cached_tokens for trace in traces)
    for trace, request in zip(traces, batch, strict=True):
        alone = run_alone(family, request)
        assert trace.output == alone.output
        assert torch.equal(torch.stack(trace.logits), torch.stack(alone.logits))
    drafted, accepted = rig.num_drafted_and_accepted
    assert (drafted > 0) is (drafter != "none")
    assert accepted > 0 or drafter in ("none", "ngram", "adversary", "looked up")
    assert accepted == drafted or drafter != "oracle"
    assert (rig.num_looked_up > 0) is (drafter == "looked up")


@pytest.mark.parametrize("family", MODELS)
def test_the_poison_would_show(family: str) -> None:
    rig = Rig(family, num_blocks=14, max_batched_tokens=160, max_num_seqs=1)
    trace = rig.add(Request(0, 40, (5,), 4, 0, 0, 0, None).sequence())
    rig.step()
    rig.runner.poison(trace.seq.block_table[:1])
    rig.step()

    assert math.isnan(trace.logits[1][0])


@pytest.mark.parametrize("family", MODELS)
def test_the_tiny_model_listens_to_its_context_and_its_seed(family: str) -> None:
    """Else the tests above could not fail: logits differ by the first token, tokens differ by the seed."""
    one, other = (run_alone(family, Request(0, 16, (tail, 9, 9, 9), 8, 1, 0, 0, None)) for tail in (1, 2))
    reseeded = run_alone(family, Request(0, 16, (1, 9, 9, 9), 8, 1, 1, 0, None))

    assert not torch.allclose(one.logits[0], other.logits[0], atol=0.1)
    assert one.output != reseeded.output
