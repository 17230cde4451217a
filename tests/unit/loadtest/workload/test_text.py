import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.text.vocabulary import load_vocabulary
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import Prompts, Trace
from penstock_loadtest.workload.hit_rate import measure_hit_rate
from penstock_loadtest.workload.text import TextMaker
from penstock_loadtest.workload.trace_row import TraceRow
from penstock_loadtest.workload.traces import read_trace

SCALES = (1, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 0.07)


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return load_tokenizer(resolve("demo"))


def maker(seed: int = 1, **settings: object) -> TextMaker:
    return TextMaker(Prompts(**settings), seed)  # type: ignore[arg-type]


def test_a_key_is_the_same_text_in_every_process_and_order() -> None:
    """Written down once: a scenario that is run again tomorrow must send the same prompts."""
    assert maker().tokens(4, 7) == [25106, 1808, 21097, 28282]
    assert maker().words(4, 7) == "than bank said west"
    assert maker().block_tokens([3, 4], 2, 4) == [15174, 2621, 7327, 4903]


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
)
def test_different_keys_are_different_texts(key: list[int], other: list[int]) -> None:
    assert (maker().tokens(8, *key) == maker().tokens(8, *other)) == (key == other)


def test_different_seeds_are_different_texts() -> None:
    assert maker(1).tokens(8, 7) != maker(2).tokens(8, 7)
    assert maker(1).block_tokens([7], 8, 8) != maker(2).block_tokens([7], 8, 8)


def test_a_longer_text_of_a_key_begins_with_the_shorter_one() -> None:
    assert maker().words(50, 7).startswith(maker().words(20, 7) + " ")
    assert maker().tokens(50, 7)[:20] == maker().tokens(20, 7)


def test_token_ids_are_of_the_range_and_evenly_spread() -> None:
    ids = np.array(maker(token_range=(300, 400)).tokens(100_000, 1))

    counts = np.bincount(ids - 300, minlength=100)
    assert len(counts) == 100
    assert counts.min() > 800
    assert counts.max() < 1200


def test_token_ids_that_no_vocabulary_has_are_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="token_range ends at 8589934592"):
        maker(token_range=(0, 1 << 33))


def test_the_same_id_is_the_same_block_wherever_it_stands() -> None:
    first, second = maker().block_tokens([1, 2, 3], 5, 15), maker().block_tokens([9, 3, 1, 2], 5, 17)

    assert first[10:] == second[5:10]
    assert first[:5] == second[10:15]
    assert first[5:7] == second[15:]
    assert first[:5] != first[5:10]


def test_blocks_of_words_are_joined_like_words() -> None:
    text = maker().block_words([1, 2, 3], 5, 12)

    assert len(text.split(" ")) == 12
    assert text.split(" ")[5:10] == maker().block_words([2], 5, 5).split(" ")


def test_ids_of_all_64_bits_name_blocks() -> None:
    ids = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]

    blocks = np.array(maker().block_tokens(ids, 8, 40)).reshape(5, 8)

    assert len({tuple(block) for block in blocks.tolist()}) == 5


def test_too_few_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 blocks of 5 tokens are fewer than 11 tokens"):
        maker().block_tokens([1, 2], 5, 11)


@pytest.mark.parametrize("count", [1, 2, 77, 3000])
def test_made_up_words_are_exactly_as_many_tokens_for_the_demo_model(demo: Tokenizer, count: int) -> None:
    assert len(demo.encode(maker().words(count, 4), False)) == count


def test_made_up_words_are_exactly_as_many_tokens_with_a_tokenizer_at_hand(tmp_path: Path, demo: Tokenizer) -> None:
    load_vocabulary(resolve("demo")).raw.save(str(tmp_path / "tokenizer.json"))
    exact = maker(tokenizer=tmp_path / "tokenizer.json")

    assert len(demo.encode(f"{exact.words(500, 1)} {exact.words(11, 2)}", False)) == 511
    assert len(demo.encode(exact.block_words([1, 2], 300, 450), False)) == 450


def test_a_corpus_is_read_from_its_path(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "one"}\n')

    assert maker(source="corpus", path=tmp_path / "texts.jsonl").corpus(5, 20) == ["one"]


def conversations(folder: Path) -> Path:
    """A small trace in the form of Mooncake's: chats whose turns repeat what came before, a system prompt that many
    share, ends that fill no block."""
    rng = np.random.default_rng(3)
    fresh = iter(range(1, 10_000))
    chats: list[list[int]] = [[0] for _ in range(12)]
    with (folder / "small_trace.jsonl").open("w") as file:
        for at in range(150):
            chat = chats[int(rng.integers(len(chats)))]
            chat += [next(fresh) for _ in range(int(rng.integers(1, 5)))]
            ids = [*chat, next(fresh)]
            row = {
                "timestamp": at,
                "input_length": 512 * len(chat) + int(rng.integers(1, 513)),
                "output_length": 5,
                "hash_ids": ids,
            }
            file.write(json.dumps(row) + "\n")
    return folder / "small_trace.jsonl"


def rate_in_file(path: Path, rows: int) -> float:
    """The ideal hit rate of a file's hash_ids, straight from its JSON: every id a trace repeats stands behind the same
    ids."""
    seen: set[int] = set()
    hits = total = 0
    for line in path.read_text().splitlines()[:rows]:
        ids = json.loads(line)["hash_ids"]
        known = [name in seen for name in ids]
        hits += [*known, False].index(False)
        total += len(ids)
        seen.update(ids)
    return hits / total


def rows_of(path: Path, scale: float, rows: int) -> Iterator[TraceRow]:
    for count, row in enumerate(read_trace(Trace(format="mooncake", path=path, token_scale=scale))):
        if count == rows:
            return
        yield row


def ids_of(rows: Iterator[TraceRow]) -> Iterator[list[int]]:
    for row in rows:
        yield maker().block_tokens(row.hash_ids or [], row.block_tokens, row.prompt_tokens)


@pytest.mark.parametrize("scale", SCALES)
def test_a_small_trace_keeps_its_ideal_hit_rate_as_token_ids(tmp_path: Path, scale: float) -> None:
    path = conversations(tmp_path)

    rate = measure_hit_rate(ids_of(rows_of(path, scale, 150)), round(512 * scale))

    assert 0.5 < rate_in_file(path, 150) < 0.95
    assert rate == pytest.approx(rate_in_file(path, 150), abs=1e-12 if scale == 1 else 0.01)


@pytest.mark.parametrize("scale", SCALES)
def test_a_small_trace_keeps_its_ideal_hit_rate_as_text(tmp_path: Path, demo: Tokenizer, scale: float) -> None:
    path = conversations(tmp_path)

    texts = (
        maker().block_words(row.hash_ids or [], row.block_tokens, row.prompt_tokens)
        for row in rows_of(path, scale, 150)
    )
    rate = measure_hit_rate((demo.encode(text, False) for text in texts), round(512 * scale))

    assert rate == pytest.approx(rate_in_file(path, 150), abs=1e-12 if scale == 1 else 0.01)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_real_traces_keep_their_ideal_hit_rate(data_dir: Path, name: str, scale: float) -> None:
    """The first 1,000 rows of each trace are checked here; `make bench-mooncake` takes all."""
    path = data_dir / "mooncake" / f"{name}_trace.jsonl"

    rate = measure_hit_rate(ids_of(rows_of(path, scale, 1000)), round(512 * scale))

    assert rate == pytest.approx(rate_in_file(path, 1000), abs=1e-12 if scale == 1 else 0.01)


def test_the_real_traces_keep_their_ideal_hit_rate_as_text(data_dir: Path, demo: Tokenizer) -> None:
    path = data_dir / "mooncake" / "conversation_trace.jsonl"

    texts = (
        maker().block_words(row.hash_ids or [], row.block_tokens, row.prompt_tokens) for row in rows_of(path, 1, 300)
    )
    rate = measure_hit_rate((demo.encode(text, False) for text in texts), 512)

    assert rate == pytest.approx(rate_in_file(path, 300), abs=1e-12)
