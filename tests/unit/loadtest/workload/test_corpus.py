import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.text.source import resolve
from penstock.text.vocabulary import load_vocabulary
from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.workload.corpus import Corpus
from penstock_loadtest.workload.vocabulary import count_tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_vocabulary(resolve("demo")).raw


def json_lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_prompts_whatever_their_field_is_called(tmp_path: Path) -> None:
    corpus = Corpus.read(
        json_lines(
            tmp_path, {"prompt": "a"}, {"question": "b", "answer": 4}, {"text": "c"}, {"turns": ["d", "e"], "id": 1}
        ),
        0,
    )

    assert sorted(corpus.turns(index, 9) for index in range(4)) == [["a"], ["b"], ["c"], ["d", "e"]]


def test_rows_are_shuffled_by_the_seed_and_come_again_when_they_are_used_up(tmp_path: Path) -> None:
    path = json_lines(tmp_path, *({"prompt": str(row)} for row in range(50)))
    first, second = ([Corpus.read(path, seed).turns(index, 9)[0] for index in range(100)] for seed in (1, 2))

    assert first[:50] == first[50:]
    assert sorted(first[:50]) == sorted(second[:50])
    assert first != second


@pytest.mark.parametrize("row", [{"id": 1}, {"prompt": ""}, {"turns": []}, {"turns": "one"}, {"text": 5}, [], "text"])
def test_a_row_without_a_prompt_is_reported_with_file_and_line(tmp_path: Path, row: object) -> None:
    path = json_lines(tmp_path, {"prompt": "a"}, row)

    with pytest.raises(TraceInvalid) as caught:
        Corpus.read(path, 0)

    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_a_corpus_without_text_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n \n")

    with pytest.raises(TraceInvalid, match=rf"{name} holds no text"):
        Corpus.read(tmp_path / name, 0)


def test_plain_text_is_cut_at_words_to_about_as_many_tokens(tmp_path: Path) -> None:
    words = [f"w{place}" for place in range(1000)]
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(" ".join(words).encode()))
    corpus = Corpus.read(tmp_path / "book.txt.gz", 0)

    passages = [corpus.turns(index, 40)[0].split() for index in range(50)]

    assert {len(passage) for passage in passages} == {30}
    assert all(word in words for passage in passages for word in passage)
    assert len({passage[0] for passage in passages}) > 30


def test_a_passage_longer_than_the_text_goes_on_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two three")

    assert len(Corpus.read(tmp_path / "short.txt", 0).turns(0, 400)[0].split()) == 300


def test_plain_text_is_cut_exactly_with_a_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "book.txt").write_text(
        "It's a truth, universally acknowledged:\nthat naïve — antidisestablishmentarianism… 12345 times!\n" * 50
    )
    corpus = Corpus.read(tmp_path / "book.txt", 0, tokenizer)

    assert [count_tokens(tokenizer, corpus.turns(index, 3 + index)[0]) for index in range(60)] == [
        3 + index for index in range(60)
    ]


def test_a_character_of_several_tokens_is_not_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "book.txt").write_text("🦜🦜🦜")

    assert Corpus.read(tmp_path / "book.txt", 0, tokenizer).turns(0, 1) == ["🦜"]


def test_real_prompts_are_read_from_every_published_set(data_dir: Path) -> None:
    sets = {"spec_bench": 320, "mt_bench": 54, "humaneval": 110, "gsm8k_test": 880, "aibrix_sharegpt_8min": 1351}

    for name, rows in sets.items():
        corpus = Corpus.read(data_dir / "text" / f"{name}.jsonl", 0)
        assert all(turn.strip() for index in range(rows) for turn in corpus.turns(index, 1))
        assert corpus.turns(0, 1) == corpus.turns(rows, 1)


def test_a_real_book_is_about_as_many_tokens_as_asked_and_exactly_with_a_tokenizer(
    data_dir: Path, tokenizer: Tokenizer
) -> None:
    path = data_dir / "text" / "shakespeare.txt.gz"
    rough, exact = Corpus.read(path, 0), Corpus.read(path, 0, tokenizer)

    assert sum(count_tokens(tokenizer, rough.turns(index, 200)[0]) for index in range(40)) == pytest.approx(
        8000, rel=0.15
    )
    assert {count_tokens(tokenizer, exact.turns(index, 200)[0]) for index in range(40)} == {200}
