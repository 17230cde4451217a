"""The counted schedule against the engine's own scheduler, step by step, on random loads."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from penstock.sim.batching import Batching, is_uniform
from penstock.sim.engine import NEVER_S, Engine
from penstock.sim.real_batching import RealBatching, is_private
from penstock.sim.sequence import ModelledSequence
from penstock.sim.step_times import Noise, StepTimes
from penstock.workers.config import EngineConfig, TimedConfig

SIZE = 4


def make_config(num_blocks: int = 64, max_num_seqs: int = 4, max_batched_tokens: int = 16) -> EngineConfig:
    timed = TimedConfig(base_s=0.01, row_s=0.001, prefill_token_s=0.0005, kv_token_s=0.00001, num_blocks=num_blocks)
    return EngineConfig(
        runner="timed",
        block_size=SIZE,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        timed=timed,
    )


def draw_load(random: Random, count: int, max_prompt: int, max_output: int) -> list[tuple[float, ModelledSequence]]:
    """Sequences of which many begin with blocks of one of three families, in order of time."""
    now, load = 0.0, []
    for sid in range(1, count + 1):
        now += random.expovariate(random.choice((5.0, 50.0)))
        prompt = random.randint(1, max_prompt)
        family = random.randrange(4)
        shared = random.randint(0, prompt // SIZE) if family else 0
        if family == 3 and shared == prompt // SIZE:
            shared += 2  # keys of the answer are known too
        keys = [b"family %d block %d" % (family, index) for index in range(shared)]
        output = max(random.randint(1, max_output), (shared + 1) * SIZE - prompt)
        load.append((now, ModelledSequence(sid, prompt, output, keys)))
    return load


def copy(seq: ModelledSequence, tpot_s: float | None = None) -> ModelledSequence:
    return ModelledSequence(seq.sid, seq.num_prompt_tokens, seq.max_tokens, list(seq.keys), tpot_s=tpot_s)


def play(
    batch: Batching | RealBatching, load: Sequence[tuple[float, ModelledSequence]], aborts: dict[int, float]
) -> list[tuple[object, ...]]:
    """What becomes of each sequence, by sid; the cached keys come last."""
    events = sorted(
        [(at_s, 0, seq) for at_s, seq in load] + [(aborts[seq.sid], 1, seq) for _, seq in load if seq.sid in aborts],
        key=lambda event: (event[0], event[1], event[2].sid),
    )
    engine = Engine(batch)
    for at_s, kind, seq in events:
        engine.advance(at_s)
        (engine.abort if kind else engine.submit)(seq, at_s)
    while engine.end_s < NEVER_S:
        engine.advance(engine.end_s)
    assert {seq.sid for seq in batch.finished} == {seq.sid for _, seq in load}
    assert len(batch.finished) == len(load)
    changes = batch.drain_changes()
    return [
        *(
            (seq.sid, seq.token_times_s, seq.num_cached_tokens, seq.num_preemptions, seq.is_refused)
            for seq in sorted(batch.finished, key=lambda seq: seq.sid)
        ),
        ("cached", sorted(changes.stored) if changes is not None else []),
    ]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_batched_tokens", "max_prompt", "max_output"),
    [
        (64, 4, 16, 40, 12),
        (24, 6, 12, 60, 20),  # preemptions
        (400, 12, 32, 100, 40),
        (400, 3, 64, 30, 60),  # full rows
        (40, 8, 8, 120, 30),
    ],
)
@pytest.mark.parametrize("seed", range(12))
def test_every_token_comes_when_the_engines_scheduler_has_it(
    num_blocks: int, max_num_seqs: int, max_batched_tokens: int, max_prompt: int, max_output: int, seed: int
) -> None:
    random = Random(seed)
    config = make_config(num_blocks, max_num_seqs, max_batched_tokens)
    load = draw_load(random, 60, max_prompt, max_output)
    aborts = {seq.sid: at_s + random.expovariate(4.0) for at_s, seq in load if random.random() < 0.1}

    results = []
    for kind in (Batching, RealBatching):
        batch = kind(config, 4096, StepTimes(config.timed), Noise(0.2, (seed,)), 0.0)
        results.append(play(batch, [(at_s, copy(seq)) for at_s, seq in load], aborts))
        if isinstance(batch, Batching):
            batch.cache.check()
        else:
            batch.pool.check([])

    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(4))
def test_steps_with_a_short_prompt_are_the_same_ones(seed: int, tmp_path: Path) -> None:
    table = {"decode_rows": [0, 8], "prefill_tokens": [0, 16], "kv_tokens": [0, 100], "short_prompt_tokens": 12}
    table |= {"seconds": [[[0.01, 0.011], [0.02, 0.021]], [[0.012, 0.013], [0.022, 0.023]]]}
    times = {}
    load = draw_load(Random(seed), 60, 40, 12)
    for name, more in (("alike", 0.0), ("short", 0.005)):
        short = [[[each + more for each in line] for line in plane] for plane in table["seconds"]]
        (tmp_path / name).write_text(json.dumps(table | {"short_seconds": short}))
        timed = msgspec.structs.replace(make_config(24, 6).timed, table=str(tmp_path / name))
        config = msgspec.structs.replace(make_config(24, 6), timed=timed)
        for kind in (Batching, RealBatching):
            batch = kind(config, 4096, StepTimes(timed), Noise(0.0, (seed,)), 0.0)
            times[name, kind] = play(batch, [(at_s, copy(seq)) for at_s, seq in load], {})

    assert times["short", Batching] == times["short", RealBatching] != times["alike", Batching]


@pytest.mark.parametrize("tpot_s", [0.014, 0.018, 0.025])
@pytest.mark.parametrize(("num_blocks", "max_prompt"), [(400, 100), (30, 60)])  # the second with preemptions
@pytest.mark.parametrize("seed", range(2))
def test_targets_are_kept_by_the_same_steps(num_blocks: int, max_prompt: int, tpot_s: float, seed: int) -> None:
    random = Random(seed)
    config = make_config(num_blocks, 12, 64)
    load = draw_load(random, 60, max_prompt, 40)
    aborts = {seq.sid: at_s + random.expovariate(4.0) for at_s, seq in load if random.random() < 0.1}

    results = []
    for kind, target_s in ((Batching, tpot_s), (RealBatching, tpot_s), (Batching, None)):
        times = StepTimes(config.timed)
        batch = kind(config, 4096, times, Noise(0.2, (seed,)), 0.0, times.costs)
        results.append(play(batch, [(at_s, copy(seq, target_s)) for at_s, seq in load], aborts))

    assert results[0] == results[1]
    assert results[0] != results[2]


def test_sequences_count_as_one_another_unless_a_target_depends_on_their_contexts() -> None:
    costs = StepTimes(make_config().timed).costs  # 11 ms for a row, 10 us for each token of its context

    assert is_uniform(costs, 0.014, 100)
    assert not is_uniform(costs, 0.014, 1000)
    assert is_uniform(costs, 0.009, 1000), "no row keeps it"


@pytest.mark.parametrize("tpot_s", [None, 0.018])
@pytest.mark.parametrize("seed", range(8))
def test_the_numbers_of_load_reports_are_the_engines(seed: int, tpot_s: float | None) -> None:
    random = Random(seed)
    config = make_config(num_blocks=30, max_num_seqs=6)
    load = draw_load(random, 60, 50, 20)
    times = StepTimes(config.timed)
    engines = [
        Engine(kind(config, 4096, times, Noise(0.1, (seed,)), 0.0, times.costs)) for kind in (Batching, RealBatching)
    ]
    copies = [[copy(seq, tpot_s) for _, seq in load] for _ in engines]

    states = []
    for place, (at_s, _) in enumerate(load):
        for engine, seqs in zip(engines, copies, strict=True):
            engine.advance(at_s)
            engine.submit(seqs[place], at_s)
        ours, theirs = (engine.batch for engine in engines)
        states.append((ours.state(), theirs.state(), ours.noted, theirs.noted))

    assert all(state == real for state, real, _, _ in states)
    assert all(state == real for _, _, state, real in states)
    assert any(state.num_waiting for state, _, _, _ in states)
    assert (min(state.num_places for state, _, _, _ in states) < config.num_places) is (tpot_s is not None)


def test_private_keys_are_told_from_those_that_others_may_have() -> None:
    config = make_config()
    batch = RealBatching(config, 4096, StepTimes(config.timed), Noise(0.0, (0,)), 0.0)
    engine = Engine(batch)
    engine.submit(ModelledSequence(1, 20, 9, [b"first"]), 0.0)

    engine.advance(10.0)
    changes = batch.drain_changes()

    assert changes is not None
    assert changes.stored == [b"first"]
    assert len([key for key in batch.pool.cached_keys() if is_private(key)]) == 6
