"""The draft head: what serves says what was trained, whatever pieces its keys and values came in; answers stay the
same; files that are none are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.batch import Span, build_batch
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.models.fused import make_cache
from penstock.workers.compute.models.model_step import step_of
from penstock.workers.compute.quant.quantized import quantize_int8
from penstock.workers.compute.sampling import Sampler
from penstock.workers.compute.speculation import head as heads
from penstock.workers.compute.speculation.head import HeadDrafter
from penstock.workers.compute.speculation.head_file import (
    dense_weights,
    read_head,
    write_head,
)
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.drafter_training.examples import Batch, Example, unit
from penstock.workers.drafter_training.head import TrainedHead
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.compute.speculation.tiny_heads import CONFIG, OWN_VOCAB, VOCAB, random_head, random_target
from tests.unit.workers.tiny_models import saved, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK, NUM_BLOCKS = 16, 24


class Rig:
    """A target with a head, computed step by step over shuffled blocks that are NaN where nobody wrote."""

    def __init__(self, kernels: Library, bits: int = 8, own_vocab: int = OWN_VOCAB) -> None:
        self.target, embed = random_target(CONFIG, kernels, 0.15, threads=2)
        self.embed = unit(embed)
        self.cache = make_cache(self.target, NUM_BLOCKS, BLOCK, torch.bfloat16)
        self.cache.poison(torch.arange(NUM_BLOCKS))
        self.head = random_head(CONFIG, bits, own_vocab=own_vocab)
        sampler = Sampler(VOCAB, CONFIG.eos_token_ids)
        self.drafter = HeadDrafter(self.head, self.target, NUM_BLOCKS, BLOCK, torch.bfloat16, sampler, kernels, 2)
        self.drafter.poison(torch.arange(NUM_BLOCKS))
        self.rope = self.target.parameters.cos[:, None], self.target.parameters.sin[:, None]

    def compute(self, chunks: list[Chunk]) -> Tensor:
        """A step of the target, which the head sees; the features [T, taps, hidden]."""
        step = Step(chunks, [])
        self.drafter.expect(step)
        self.target.greedy_tokens(step_of(build_batch(step, BLOCK)), self.cache)
        tapped = self.drafter.take_features()
        assert tapped is not None
        self.drafter.observe(chunks, tapped)
        return tapped


def make_sequence(
    name: str, token_ids: list[int], first_block: int, temperature: float = 0.0, **sampled: Any
) -> Sequence:
    sampling = SamplingParams(max_tokens=64, temperature=temperature, **{"seed": 5, **sampled})
    table = list(range(first_block, first_block + 6))[::-1]
    return Sequence(name, token_ids, sampling, len(token_ids), [], b"", 0.0, block_table=table)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("pieces", [[40], [1, 7, 20, 12], [33, 1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("most_waiting", [16, 3])
def test_what_serves_says_what_was_trained(
    kernels: Library,
    portable: None,
    pieces: list[int],
    bits: int,
    most_waiting: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proposals behind a prompt that came in pieces, beside another sequence, are the best by the module that is
    trained over the same tokens, features and weights."""
    monkeypatch.setattr(heads, "MOST_WAITING", most_waiting)
    monkeypatch.setattr(heads, "FEW_ROWS", most_waiting - 2)
    rig = Rig(kernels, bits)
    tokens = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    seq, other = make_sequence("a", tokens, 0), make_sequence("b", tokens[::-1], 8)
    features, start = [], 0
    for count in pieces:
        chunk, beside = Chunk(seq, start, count), Chunk(other, start, count)
        features.append(rig.compute([beside, chunk])[count:])
        start += count
    chunk = Chunk(seq, 40, 1, max_drafts=4)
    drafts = rig.drafter.propose([Chunk(other, 40, 1), chunk])
    assert not drafts[0]
    assert len(drafts[1]) == 4

    ids = torch.tensor(tokens + drafts[1])
    tapped = torch.cat([*features, torch.zeros(5, 3, CONFIG.hidden_size)])
    trained = TrainedHead(CONFIG, dense_weights(rig.head), rig.rope)
    example = Example(ids, 40, unit(tapped), torch.zeros(5, CONFIG.hidden_size))
    with torch.no_grad():
        logits = [scores[0, 0] for scores in trained.passes(Batch.of([example]), rig.embed, 4)]
    said = [int(rig.head.vocabulary[row.argmax()]) for row in logits]
    assert said == drafts[1]
    assert len(set(said)) > 1


def test_features_that_wait_are_read_together(
    kernels: Library, portable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence has enough: those of others that have some are read in the same call."""
    rig = Rig(kernels)
    calls: list[dict[str, tuple[int, int]]] = []
    write = rig.drafter._write

    def record(spans: list[Span], features: Tensor) -> None:
        calls.append({span.seq.request_id: (span.start, len(span.token_ids)) for span in spans if span.seq is not None})
        write(spans, features)

    monkeypatch.setattr(rig.drafter, "_write", record)
    seqs = {name: make_sequence(name, list(range(1, 60)), 6 * place) for place, name in enumerate("abcd")}
    known = {"a": 4, "b": 2, "c": 2}
    rig.compute([Chunk(seqs[name], 0, count) for name, count in known.items()])
    for step in range(17):
        names = ["a", *"b" * (step >= 9), *"c" * (step >= 14)]
        rig.compute([Chunk(seqs[name], known[name], 1) for name in names])
        known = {name: count + (name in names) for name, count in known.items()}
    assert calls == [{"a": (0, 4), "b": (0, 2), "c": (0, 2)}, {"a": (4, 17), "b": (2, 8)}], "three are too few"

    for _ in range(2):
        rig.compute([Chunk(seqs[name], known[name], 1) for name in "bc"])
        known = {name: count + (name in "bc") for name, count in known.items()}
    rig.compute([Chunk(seqs["b"], known["b"], 1), Chunk(seqs["c"], known["c"], 1), Chunk(seqs["d"], 0, 5)])
    assert calls[2:] == [{"c": (2, 6), "d": (0, 5)}], "along with those of a prompt, too"


def test_a_token_is_proposed_where_the_scores_give_it_a_chance(kernels: Library, portable: None) -> None:
    """The chance is the softmax of what the trained module says: proposals end before the first whose chance, with all
    before it, is too little, and no more are computed behind one."""
    rig = Rig(kernels)
    generator = torch.Generator().manual_seed(8)
    found: set[int] = set()
    for number in range(6):
        tokens = torch.randint(0, VOCAB, (21,), generator=generator).tolist()
        seq = make_sequence(f"{number}", tokens, 0)
        features = rig.compute([Chunk(seq, 0, 20)])
        chunk = Chunk(seq, 20, 1, max_drafts=4)
        (drafts,) = rig.drafter.propose([chunk])
        assert len(drafts) == chunk.num_rounds == 4
        rig.drafter.forget(seq)

        tapped = torch.cat([features, torch.zeros(5, 3, CONFIG.hidden_size)])
        example = Example(torch.tensor(tokens + drafts), 20, unit(tapped), torch.zeros(5, CONFIG.hidden_size))
        trained = TrainedHead(CONFIG, dense_weights(rig.head), rig.rope)
        with torch.no_grad():
            shares = [float(s[0, 0].softmax(0).max()) for s in trained.passes(Batch.of([example]), rig.embed, 4)]
        chances = torch.tensor(shares).cumprod(0).tolist()
        for kept in range(4):
            seq = make_sequence(f"{number}-{kept}", tokens, 0)
            rig.compute([Chunk(seq, 0, 20)])
            between = (chances[kept] * (1.0 if kept == 0 else chances[kept - 1])) ** 0.5
            chunk = Chunk(seq, 20, 1, max_drafts=4, keep_from=between, go_from=between)
            (proposed,) = rig.drafter.propose([chunk])
            assert proposed == drafts[:kept]
            assert chunk.num_rounds == kept + 1
            found.add(len(proposed))
            rig.drafter.forget(seq)
            # with a penalty they take the way of one pass a call
            seq = make_sequence(f"{number}-{kept}s", tokens, 0, temperature=0.01, presence_penalty=0.1)
            rig.compute([Chunk(seq, 0, 20)])
            chunk = Chunk(seq, 20, 1, max_drafts=4, keep_from=2.0, go_from=2.0)
            assert rig.drafter.propose([chunk]) == [[]]
            assert chunk.num_rounds == 1
            rig.drafter.forget(seq)
    assert found == {0, 1, 2, 3}


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.5, "seed": 6},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.2, "min_p": 0.2},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("level", [Level.PORTABLE, Level.AVX2, Level.VNNI])
def test_sampled_drafts_of_one_call_are_those_that_are_drawn_one_by_one(
    kernels: Library, portable: None, level: Level
) -> None:
    """Different lengths stand beside one another, and beside a greedy one; the head's tokens fill no whole vector."""
    if not kernels.matmul.set_level(level):
        pytest.skip(f"this CPU does not have {level.name}")
    rig = Rig(kernels, own_vocab=69)
    generator = torch.Generator().manual_seed(9)
    num_drawn = 0
    for number in range(4):
        tokens = torch.randint(0, VOCAB, (21,), generator=generator).tolist()
        found: list[list[list[int]]] = []
        for can_draw in (True, False):
            rig.drafter._can_draw = can_draw
            seqs = [
                make_sequence(f"{number} {can_draw} {place}", tokens, 3 * place, **sampled)
                for place, sampled in enumerate(SAMPLED)
            ]
            rig.compute([Chunk(seq, 0, 20) for seq in seqs])
            chunks = [Chunk(seq, 20, 1, max_drafts=4 - place % 3) for place, seq in enumerate(seqs)]
            found.append(rig.drafter.propose(chunks))
            assert [len(each) for each in found[-1]] == [chunk.max_drafts for chunk in chunks]
            for seq in seqs:
                rig.drafter.forget(seq)
        assert found[0] == found[1]
        likeliest = found[0][-1]
        num_drawn += sum(drawn[: len(likeliest)] != likeliest for drawn in found[0])
    assert num_drawn > 6, "they are not the likeliest"


def test_a_sampled_token_has_its_share_at_its_temperature_for_a_chance(kernels: Library, portable: None) -> None:
    rig = Rig(kernels)
    generator = torch.Generator().manual_seed(10)
    lengths: set[int] = set()
    for number in range(6):
        tokens = torch.randint(0, VOCAB, (21,), generator=generator).tolist()
        seq = make_sequence(f"{number}", tokens, 0, temperature=0.6)
        features = rig.compute([Chunk(seq, 0, 20)])
        (drafts,) = rig.drafter.propose([Chunk(seq, 20, 1, max_drafts=3)])
        rig.drafter.forget(seq)

        tapped = torch.cat([features, torch.zeros(4, 3, CONFIG.hidden_size)])
        example = Example(torch.tensor(tokens + drafts), 20, unit(tapped), torch.zeros(4, CONFIG.hidden_size))
        trained = TrainedHead(CONFIG, dense_weights(rig.head), rig.rope)
        places = [rig.head.vocabulary.tolist().index(token) for token in drafts]
        with torch.no_grad():
            passes = trained.passes(Batch.of([example]), rig.embed, 3)
            shares = [float((s[0, 0] / 0.6).softmax(0)[place]) for s, place in zip(passes, places, strict=True)]
        chances = torch.tensor(shares).cumprod(0).tolist()
        for kept in range(3):
            seq = make_sequence(f"{number}-{kept}", tokens, 0, temperature=0.6)
            rig.compute([Chunk(seq, 0, 20)])
            between = (chances[kept] * (1.0 if kept == 0 else chances[kept - 1])) ** 0.5
            chunk = Chunk(seq, 20, 1, max_drafts=3, keep_from=between, go_from=between)
            assert rig.drafter.propose([chunk]) == [drafts[:kept]]
            assert chunk.num_rounds == kept + 1
            lengths.add(kept)
            rig.drafter.forget(seq)
    assert lengths == {0, 1, 2}


def test_accepted_and_rejected_drafts_leave_what_plain_steps_leave(kernels: Library, portable: None) -> None:
    """Proposals after a step whose draft was kept in part are those after the same tokens without drafts."""
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    drafted, plain = make_sequence("a", tokens[:20], 0), make_sequence("b", tokens[:20], 8)
    rig.compute([Chunk(drafted, 0, 19), Chunk(plain, 0, 19)])
    for accepted in (2, 0, 1):
        place = len(drafted.token_ids)
        draft = tokens[place : place + accepted] + [7, 8, 9][accepted:]
        rig.drafter.propose([Chunk(drafted, place - 1, 1, max_drafts=3)])
        rig.compute([Chunk(drafted, place - 1, 1, 3, draft)])
        drafted.token_ids += tokens[place : place + accepted + 1]
        for _ in range(accepted + 1):
            rig.compute([Chunk(plain, len(plain.token_ids) - 1, 1)])
            plain.token_ids.append(tokens[len(plain.token_ids)])
    assert drafted.token_ids == plain.token_ids
    found = [rig.drafter.propose([Chunk(seq, len(seq.token_ids) - 1, 1, max_drafts=4)])[0] for seq in (drafted, plain)]
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_a_sequence_whose_features_are_not_known_goes_on_later(kernels: Library, portable: None) -> None:
    """One that begins behind a cached prefix, and one that was preempted."""
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    seq = make_sequence("a", tokens, 0)
    rig.compute([Chunk(seq, 0, 32)])
    found = make_sequence("b", tokens, 0)
    assert rig.drafter.propose([Chunk(found, 39, 1, max_drafts=2)]) == [[]]
    rig.compute([Chunk(found, 32, 7)])
    assert len(rig.drafter.propose([Chunk(found, 39, 1, max_drafts=2)])[0]) == 2
    found.num_preemptions += 1
    assert rig.drafter.propose([Chunk(found, 39, 1, max_drafts=2)]) == [[]]
    rig.drafter.forget(found)


def propose(rig: Rig, seq: Sequence) -> list[int]:
    """Ask for up to four proposals behind the tokens of a sequence whose last one is not computed yet."""
    return rig.drafter.propose([Chunk(seq, seq.num_tokens - 1, 1, max_drafts=4)])[0]


def test_steps_that_are_not_observed_leave_nothing_and_cost_drafts_alone(kernels: Library, portable: None) -> None:
    """What the head has not written is NaN here, and a read of it would show: nothing could be proposed."""
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(6)).tolist()
    seq = make_sequence("a", tokens[:81], 0)
    rig.compute([Chunk(seq, 0, 5)])
    for start in range(5, 70, 5):
        step = Step([Chunk(seq, start, 5, is_observed=False)], [])
        rig.drafter.expect(step)
        rig.target.greedy_tokens(step_of(build_batch(step, BLOCK)), rig.cache)
        assert rig.drafter.take_features() is None
        assert propose(rig, seq) == []
    rig.compute([Chunk(seq, 70, 10)])
    assert len(propose(rig, seq)) == 4

    other = make_sequence("b", tokens, 8)
    for start in range(0, 85, 5):
        step = Step([Chunk(other, start, 5, is_observed=start >= 70)], [])
        rig.drafter.expect(step)
        rig.target.greedy_tokens(step_of(build_batch(step, BLOCK)), rig.cache)
        tapped = rig.drafter.take_features()
        if tapped is not None:
            rig.drafter.observe(step.chunks, tapped)
    del other.token_ids[86:]
    seq.token_ids += tokens[81:86]
    for place in range(80, 85):
        rig.compute([Chunk(seq, place, 1)])
    assert propose(rig, seq) == propose(rig, other), "one step or several, the same window"


def test_a_rejected_draft_stands_for_no_step_that_was_not_observed(kernels: Library, portable: None) -> None:
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(12)).tolist()
    drafted, plain = make_sequence("a", tokens[:20], 0), make_sequence("b", tokens[:20], 8)
    rig.compute([Chunk(drafted, 0, 19), Chunk(plain, 0, 19)])
    rig.compute([Chunk(drafted, 19, 1, 3, [7, 8, 9]), Chunk(plain, 19, 1)])
    for seq in (drafted, plain):
        seq.token_ids += tokens[20:]
        step = Step([Chunk(seq, 20, 1, is_observed=False)], [])
        rig.drafter.expect(step)
        rig.target.greedy_tokens(step_of(build_batch(step, BLOCK)), rig.cache)
        rig.compute([Chunk(seq, 21, 1)])
    for chunk in (Chunk(drafted, 22, 1), Chunk(plain, 22, 1)):
        rig.compute([chunk])
        chunk.seq.token_ids.append(5)
    assert propose(rig, drafted) == propose(rig, plain)


def test_a_sequence_behind_blocks_that_the_head_has_not_written_reads_none_of_them(
    kernels: Library, portable: None
) -> None:
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (96,), generator=torch.Generator().manual_seed(7)).tolist()
    seq = make_sequence("a", tokens, 0)
    step = Step([Chunk(seq, 0, 80, is_observed=False)], [])
    rig.drafter.expect(step)
    rig.target.greedy_tokens(step_of(build_batch(step, BLOCK)), rig.cache)
    found = make_sequence("b", tokens[:91], 0)
    rig.compute([Chunk(found, 80, 10)])
    assert len(propose(rig, found)) == 4
    assert rig.drafter._states[found].num_skipped == 80


def test_a_few_tokens_between_that_the_head_has_not_read_are_written_without_features(
    kernels: Library, portable: None
) -> None:
    """The last block of an answer, where the next turn of its conversation goes on."""
    rig = Rig(kernels)
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    seq = make_sequence("a", tokens[:40], 0)
    rig.compute([Chunk(seq, 0, 40)])
    seq.token_ids += tokens[40:48]
    for place in range(40, 48):
        rig.compute([Chunk(seq, place, 1)])
    rig.drafter.forget(seq)
    found = make_sequence("b", tokens, 0)
    rig.compute([Chunk(found, 48, 11)])
    assert rig.drafter._states[found].num_skipped == 0
    assert len(propose(rig, found)) == 4


def test_blocks_of_another_window_are_not_read(kernels: Library, portable: None) -> None:
    """Keys in a window are turned by their places in it."""
    rig = Rig(kernels)
    rig.drafter._windows[:4] = [0, 0, 1, 1]
    assert rig.drafter._find_window([0, 1, 2, 3, 4], 4) == (0, 2)
    assert rig.drafter._find_window([9, 2, 3, 1, 4], 3) == (1, 3)
    assert rig.drafter._find_window([9, 9, 9, 9, 9, 9], 6) == (6, 6)
    assert rig.drafter._find_window([9, 9, 9, 9], 3) == (0, 0)
    rig.drafter.expect(Step([], [], [(0, 1)]))
    assert rig.drafter._find_window([0, 1, 2, 3, 4], 2) == (0, 1), "a copy has nothing of the head's"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("target")
    return saved(tiny_model("llama-tied", num_hidden_layers=4), folder)


def answers(source: ModelSource, speculation: SpeculationConfig, **changes: object) -> tuple[list[list[int]], int]:
    """Token ids of twelve sequences through an engine, and the tokens that were drafted."""
    config = EngineConfig(
        max_num_seqs=5, max_batched_tokens=24, threads=1, kv_memory_bytes=1 << 18, speculation=speculation,
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    shared = torch.randint(0, 96, (33,), generator=generator).tolist()
    with OfflineEngine(load_runner(source, config, poison=True), config) as engine:
        for number in range(12):
            count = int(torch.randint(1, 40, (1,), generator=generator))
            own = torch.randint(0, 96, (count,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=40, seed=number, temperature=0.8 * (number % 2), ignore_eos=True)
            engine.submit(str(number), shared + own if number % 3 else own, sampling)
        done = sorted((engine.wait(60) for _ in range(12)), key=lambda seq: int(seq.request_id))
        assert engine.load is not None
        return [seq.token_ids for seq in done], engine.load.num_drafted


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_answers_are_the_same_with_a_head(
    kernels: Library, checkpoint: ModelSource, tmp_path: Path, kv_dtype: str
) -> None:
    from penstock.workers.compute.model_config import read_config  # noqa: PLC0415

    path = tmp_path / "head.safetensors"
    write_head(random_head(read_config(checkpoint), 8, checkpoint.name), path)
    plain, _ = answers(checkpoint, SpeculationConfig(), kv_dtype=kv_dtype, activations="bf16")
    always = SpeculationConfig(method="head", head=str(path), max_draft_tokens=3, adaptive=False)
    drafted, num_drafted = answers(checkpoint, always, kv_dtype=kv_dtype, activations="bf16")
    assert num_drafted > 100
    assert drafted == plain


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    for bits in (8, 4):
        head = random_head(CONFIG, bits)
        write_head(head, tmp_path / "head.safetensors")
        found = read_head(tmp_path / "head.safetensors")
        assert found.spec == head.spec
        assert torch.equal(found.vocabulary, head.vocabulary)
        for name, weight in dense_weights(head).items():
            assert torch.allclose(dense_weights(found)[name], weight, atol=2e-3), name


def test_files_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(ConfigError, match="can't read the draft head"):
        read_head(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="can't read the draft head"):
        read_head(path)
    head = random_head(CONFIG, 8)
    write_head(replace(head, vocabulary=head.vocabulary.flip(0)), path)
    with pytest.raises(ConfigError, match="ascending"):
        read_head(path)
    write_head(replace(head, matrices=head.matrices | {"o": quantize_int8(torch.randn(96, 64), 32)}), path)
    with pytest.raises(ConfigError, match="matrix o"):
        read_head(path)
    with pytest.raises(ConfigError, match="hidden_size of 96"):
        head.spec.check_fits(replace(CONFIG, hidden_size=192))


def test_a_head_that_can_not_serve_is_refused_before_weights_are_read(checkpoint: ModelSource, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    wanted = SpeculationConfig(method="head", head=str(path))
    with pytest.raises(ConfigError, match="there is no file"):
        load_runner(checkpoint, EngineConfig(speculation=wanted))
    write_head(random_head(CONFIG, 8), path)
    with pytest.raises(ConfigError, match="trained for tiny, with"):
        load_runner(checkpoint, EngineConfig(speculation=wanted))
    for engine in (EngineConfig(exact=True, speculation=wanted), EngineConfig(dtype="float32", speculation=wanted)):
        with pytest.raises(ConfigError, match="needs the CPU kernels"):
            load_runner(checkpoint, engine)
    spec = random_head(CONFIG, 8)
    one = replace(spec, spec=msgspec.structs.replace(spec.spec, taps=[1]))
    write_head(one, path)
    with pytest.raises(ConfigError, match="matrix first"):
        read_head(path)
