from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer as load_platform_tokenizer
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.workload.vocabulary import WORDS, find_single_token_words, load_tokenizer


def byte_pairs(words: list[str]) -> Tokenizer:
    """A byte-level tokenizer of which these words, alone and behind a space, are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=10_000, min_frequency=1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((f"{word} {word}" for word in words), trainer)
    return tokenizer


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_every_word_is_one_token_of_the_demo_model_wherever_it_stands() -> None:
    """A check of the common words: without a tokenizer.json, made-up text is exact for this vocabulary all the same."""
    tokenizer = load_platform_tokenizer(resolve("demo"))

    assert [
        word
        for word in WORDS
        if len(tokenizer.encode(f"{word} {word}", False)) != 2 or len(tokenizer.encode(word, False)) != 1
    ] == []


def test_words_that_are_several_tokens_are_left_out() -> None:
    words = find_single_token_words(byte_pairs(list(WORDS[:100])))

    assert words == WORDS[:100]


def test_where_our_words_are_too_few_the_vocabularys_own_are_taken() -> None:
    own = [f"{a}{b}x" for a in "qzk" for b in "abcdefghijklmnopqrstuvwxyz"]

    assert set(find_single_token_words(byte_pairs(own))) == {*own, *"qzk"}


def test_a_vocabulary_without_words_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match=r"has \d words of one token, too few"):
        find_single_token_words(byte_pairs(list(WORDS[:5])))


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')

    with pytest.raises(ScenarioInvalid, match=r"tokenizer.json is not a tokenizer.json: "):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ScenarioInvalid, match=r"none.json can't be read"):
        load_tokenizer(tmp_path / "none.json")
