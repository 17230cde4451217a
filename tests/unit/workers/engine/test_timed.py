import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.prefix.hashing import ChainHasher
from penstock.wire.frames import SamplingParams, StepCosts
from penstock.workers.config import EngineConfig, SpeculationConfig, TimedConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Chunk, Sequence, Step, StepShape
from penstock.workers.engine.timed import CATCH_UP_S, StepTable, TimedRunner, load_table
from tests.unit.workers.paged_hash import make_sequence

BLOCK_SIZE = 4
HASHER = ChainHasher(bytes(16), BLOCK_SIZE)
NO_SPECULATION = SpeculationConfig()


@dataclass
class FakeTime:
    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Play:
    """A scheduler over a timed runner."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_batched_tokens: int = 64,
        eos: frozenset[int] = frozenset(),
        speculation: SpeculationConfig = NO_SPECULATION,
        **changes: object,
    ) -> None:
        timed = TimedConfig(**{"base_s": 0.01, "num_blocks": num_blocks} | changes)  # type: ignore[arg-type]
        config = EngineConfig(
            runner="timed",
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_batched_tokens=max_batched_tokens,
            timed=timed,
            speculation=speculation,
        )
        self.time = FakeTime()
        self.runner = TimedRunner(config, eos, self.time.clock, self.time.sleep)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, HASHER, config, self.runner.max_model_len, self.runner.eos_token_ids)

    def finish(self, *sequences: Sequence) -> list[list[int]]:
        for seq in sequences:
            assert self.scheduler.add(seq), seq.error
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            self.scheduler.commit(step, self.runner.launch(step)())
        self.pool.check([])
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]


def sequence(length: int = 10, max_tokens: int = 12, seed: int = 0, output: list[int] | None = None) -> Sequence:
    return make_sequence(
        HASHER, list(range(length)), SamplingParams(max_tokens=max_tokens, seed=seed), output=output or []
    )


def shape(decode_rows: int = 0, prefill_tokens: int = 0, kv_tokens: int = 0) -> StepShape:
    return StepShape(decode_rows, decode_rows, prefill_tokens, 0.0, kv_tokens)


def decode_step(rows: int = 1, context: int = 8) -> Step:
    table = list(range(context // BLOCK_SIZE + 1))
    return Step(
        [
            Chunk(
                Sequence("r", [1] * (context + 1), SamplingParams(max_tokens=9), 1, [], b"", 0.0, block_table=table),
                context,
                1,
            )
            for _ in range(rows)
        ],
        [],
    )


def test_the_tokens_do_not_depend_on_chunks_batch_or_preemption() -> None:
    alone = Play().finish(sequence(30, 20))[0]
    crowded = Play(num_blocks=16, max_batched_tokens=9)
    sequences = [sequence(11, 20), sequence(9, 20), sequence(30, 20)]

    assert crowded.finish(*sequences)[2] == alone
    assert sum(seq.num_preemptions for seq in sequences) > 0


def test_only_the_given_ids_are_chosen_and_not_all_answers_are_alike() -> None:
    config = EngineConfig(runner="timed", block_size=BLOCK_SIZE, timed=TimedConfig(base_s=0.0, num_blocks=64))
    choices = (5, 70, 900, 49_151, 60_000)
    play = Play()
    play.runner = TimedRunner(config, frozenset({70}), play.time.clock, play.time.sleep, choices)
    answers = [play.finish(sequence(length, 40))[0] for length in (10, 11)]

    assert {token for answer in answers for token in answer} == {5, 900, 49_151}
    assert answers[0] != answers[1]


def test_a_resumed_sequence_says_the_rest() -> None:
    whole = Play().finish(sequence())[0]

    assert Play().finish(sequence(output=whole[:7]))[0] == whole


def test_a_prefix_hit_says_the_same_as_a_miss() -> None:
    play = Play()
    first, again = sequence(21), sequence(21)

    assert play.finish(first) == play.finish(again)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)


def test_generated_tokens_are_part_of_a_prefix_hit() -> None:
    play = Play()
    (output,) = play.finish(sequence(6, max_tokens=15))
    prompt = [*range(6), *output, 1, 2, 3]
    hit, miss = (make_sequence(HASHER, prompt, SamplingParams(max_tokens=5)) for _ in range(2))

    assert play.finish(hit) == Play().finish(miss)
    assert hit.num_cached_tokens == 20


def test_a_prefix_hit_on_a_wrong_block_shows() -> None:
    play = Play()
    right = play.finish(sequence(21))
    wrong = sequence(21)
    play.runner._kv[play.pool.match(wrong.block_keys, 5)[-1]] += 1

    assert play.finish(wrong) != right


def test_tokens_depend_on_the_seed_and_on_the_history() -> None:
    outputs = [Play().finish(seq)[0] for seq in (sequence(), sequence(seed=1), sequence(length=11))]

    assert len({tuple(output) for output in outputs}) == 3
    assert all(len(set(output)) > 6 for output in outputs)


def test_end_of_sequence_is_never_said() -> None:
    (output,) = Play(eos=frozenset({0, 2, 3}), vocab_size=4).finish(sequence(max_tokens=50))

    assert set(output) == {1}
    assert len(output) == 50


def test_nothing_is_kept_of_a_forgotten_sequence() -> None:
    play = Play()
    seq = sequence()
    play.finish(seq)
    play.runner.forget(seq)
    play.runner.forget(seq)

    assert play.runner._histories == {}


def test_a_step_takes_its_time_however_long_its_tokens_took() -> None:
    play = Play()
    play.time.now += 5  # idle
    play.runner.launch(decode_step())()

    assert play.time.slept == [pytest.approx(0.01)]


def test_the_time_between_steps_does_not_add_up() -> None:
    play = Play()
    begin = play.time.now
    for _ in range(100):
        play.runner.launch(decode_step())()
        play.time.now += 0.5 * CATCH_UP_S  # the engine's own work

    assert play.time.now - begin == pytest.approx(100 * 0.01, abs=CATCH_UP_S)


def test_an_idle_time_is_not_made_up_for() -> None:
    play = Play()
    play.runner.launch(decode_step())()
    play.time.now += 2 * CATCH_UP_S
    play.runner.launch(decode_step())()

    assert play.time.slept == [pytest.approx(0.01), pytest.approx(0.01)]


def test_constants_add_up_to_the_time_of_a_step() -> None:
    timed = TimedConfig(base_s=1.0, row_s=0.1, prefill_token_s=0.01, kv_token_s=0.001)
    fake = FakeTime()
    runner = TimedRunner(
        EngineConfig(runner="timed", block_size=BLOCK_SIZE, timed=timed), clock=fake.clock, sleep=fake.sleep
    )
    step = decode_step(rows=2, context=9)
    step.chunks.append(Chunk(sequence(30), 0, 7))
    step.chunks[-1].seq.block_table = [0, 1]
    runner.launch(step)()

    assert fake.slept == [pytest.approx(1.0 + 2 * 0.1 + 7 * 0.01 + 20 * 0.001)]
    assert runner.costs == StepCosts(base_s=1.0, row_s=0.1, prefill_token_s=0.01, kv_token_s=0.001)


def plane_table() -> StepTable:
    """Times that lie on 1 + rows + prefill/10 + kv/100."""
    rows, prefill, kv = [0, 2, 10], [0, 100], [0, 50, 1000]
    return StepTable(rows, prefill, kv, [[[1 + i + j / 10 + k / 100 for k in kv] for j in prefill] for i in rows])


@pytest.mark.parametrize(
    ("rows", "prefill", "kv"), [(0, 0, 0), (2, 100, 50), (1, 30, 20), (7, 99, 999), (20, 300, 5000)]
)
def test_a_table_is_interpolated_and_goes_on_beyond_its_end(rows: int, prefill: int, kv: int) -> None:
    assert plane_table().at(shape(rows, prefill, kv)) == pytest.approx(1 + rows + prefill / 10 + kv / 100)


def test_a_table_holds_its_value_before_its_first_point() -> None:
    table = StepTable([4, 8], [0, 1], [0, 1], [[[4.0, 4.0]] * 2, [[8.0, 8.0]] * 2])

    assert table.at(shape(1)) == 4.0


def test_a_table_gives_the_costs_that_fit_it() -> None:
    costs = plane_table().costs

    assert costs.row_s == pytest.approx(1, rel=0.1)
    assert costs.kv_token_s == pytest.approx(0.01, rel=0.1)


def test_a_step_with_a_short_prompt_has_a_grid_of_its_own() -> None:
    long = plane_table()
    short = [[[2 * each for each in line] for line in plane] for plane in long.seconds]
    table = msgspec.structs.replace(long, short_prompt_tokens=128, short_seconds=short)
    step = shape(2, 100, 50)

    times = [table.at(step._replace(shortest_prompt=tokens)) / table.at(step) for tokens in (0, 1, 127, 128)]
    assert times == [1, pytest.approx(2), pytest.approx(2), 1]
    whole, part = (100 * each.costs.prefill_token_s + 5050 * each.costs.attention_s for each in (table, long))
    assert part < whole < 2 * part, "between both grids"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_prompt_tokens": 128}, "give both or neither"),
        ({"short_seconds": plane_table().seconds}, "give both or neither"),
        ({"short_prompt_tokens": 128, "short_seconds": [[[1.0]]]}, "short_seconds must be a grid of 3 x 2 x 3"),
        ({"short_prompt_tokens": -1, "short_seconds": plane_table().seconds}, "can't be negative"),
    ],
)
def test_half_of_a_second_grid_is_refused_with_a_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(plane_table(), **fields)


def test_a_runner_takes_its_times_from_the_table(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(
        json.dumps(
            {
                "decode_rows": [0, 8],
                "prefill_tokens": [0, 64],
                "kv_tokens": [0, 100],
                "seconds": [[[0.1, 0.1]] * 2, [[0.9, 0.9]] * 2],
            }
        )
    )
    fake = FakeTime()
    runner = TimedRunner(
        EngineConfig(runner="timed", block_size=BLOCK_SIZE, timed=TimedConfig(table=str(path))),
        clock=fake.clock,
        sleep=fake.sleep,
    )
    runner.launch(decode_step(rows=4))()

    assert fake.slept == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"decode_rows": [0], "prefill_tokens": [0, 1], "kv_tokens": [0, 1], "seconds": [[[1, 1], [1, 1]]]}',
        '{"decode_rows": [1, 0], "prefill_tokens": [0, 1], "kv_tokens": [0, 1], '
        '"seconds": [[[1, 1], [1, 1]], [[1, 1], [1, 1]]]}',
        '{"decode_rows": [0, 1], "prefill_tokens": [0, 1], "kv_tokens": [0, 1], '
        '"seconds": [[[1, 1], [1, 1]], [[1, 1], [1]]]}',
        '{"decode_rows": [0, 1], "prefill_tokens": [0, 1], "kv_tokens": [0, 1], '
        '"seconds": [[[1, 1], [1, 1]], [[1, 1], [1, 1]]], "more": 1}',
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match="is no step table"):
        load_table(str(path))


def test_a_missing_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no step table"):
        load_table("no/such/file.json")


@pytest.mark.parametrize(
    ("num_blocks", "longest", "configured", "expected"),
    [(4, 8192, None, 64), (4096, 8192, None, 8192), (4096, 8192, 100, 100)],
)
def test_the_context_is_what_the_cache_holds_at_most(
    num_blocks: int, longest: int, configured: int | None, expected: int
) -> None:
    timed = TimedConfig(num_blocks=num_blocks, max_model_len=longest)

    assert (
        TimedRunner(EngineConfig(runner="timed", block_size=16, max_model_len=configured, timed=timed)).max_model_len
        == expected
    )


def speculating(acceptance: float, **timed: object) -> Play:
    return Play(speculation=SpeculationConfig(method="ngram"), draft_acceptance=acceptance, **timed)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_a_played_draft_changes_no_token_and_is_right_as_often_as_said(acceptance: float) -> None:
    sequences = [sequence(11, 120), sequence(9, 120, seed=4), sequence(30, 120)]
    plain = [Play().finish(sequence(seq.num_prompt_tokens, 120, seed=seq.sampling.seed))[0] for seq in sequences]
    play = speculating(acceptance, num_blocks=100)

    assert play.finish(*sequences) == plain
    drafts = play.scheduler.drafts
    assert drafts is not None
    assert drafts.num_drafted > 70
    lowest, highest = {0.0: (0.0, 0.0), 0.5: (0.15, 0.4), 1.0: (1.0, 1.0)}[acceptance]
    assert (
        lowest <= drafts.num_accepted / drafts.num_drafted <= highest
    )  # of 4 tokens at 0.5 each: 0.23 before the first wrong one


def test_a_played_draft_costs_its_time() -> None:
    plain, drafted = Play(), speculating(1.0, draft_token_s=0.002)
    plain.finish(sequence(9, 21))
    drafted.finish(sequence(9, 21))

    assert sum(plain.time.slept) == pytest.approx(21 * 0.01)
    assert sum(drafted.time.slept) == pytest.approx(5 * 0.01 + 16 * 0.002)
    assert drafted.runner.costs.draft_token_s == 0.002


@pytest.mark.parametrize("speculation", [NO_SPECULATION, SpeculationConfig(method="ngram", max_draft_tokens=3)])
def test_a_step_that_is_run_again_goes_on_from_where_it_began(speculation: SpeculationConfig) -> None:
    wanted = Play(max_batched_tokens=8).finish(sequence(21, seed=4))[0]
    play = Play(max_batched_tokens=8, speculation=speculation)
    seq = sequence(21, seed=4)
    play.scheduler.add(seq)
    while play.scheduler.has_work:
        step = play.scheduler.schedule()
        play.runner.launch(step)  # nothing of it is committed
        for chunk in step.chunks:
            chunk.draft = None
        again = [Chunk(chunk.seq, chunk.start, chunk.num_tokens) for chunk in step.chunks]
        play.scheduler.commit(step, play.runner.launch(Step(again, []))())

    assert seq.token_ids[21:] == wanted
