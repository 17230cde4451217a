"""The word table against the library, for every pre-tokenizer that has a twin here."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from penstock.text import words
from penstock.text.source import ModelSource
from penstock.text.vocabulary import PRE_TOKENIZERS, load_vocabulary
from tests.unit.text.conftest import NASTY

TWINS = {"smollm": words.SMOLLM, "gpt-2": words.GPT2, "llama-bpe": words.LLAMA3, "qwen2": words.QWEN2}
ALL_SETTLED = [char for char in map(chr, range(0x3000)) if words.SETTLED.fullmatch(char)]


@pytest.fixture(scope="module")
def libraries(demo: ModelSource) -> dict[str, RawTokenizer]:
    """The demo's vocabulary behind each pre-tokenizer."""
    found = {}
    for kind in TWINS:
        found[kind] = load_vocabulary(demo).raw
        found[kind].normalizer = None
        PRE_TOKENIZERS[kind](found[kind])
        found[kind].encode_special_tokens = True
    return found


def agrees(kind: str, raw: RawTokenizer, text: str) -> bool:
    def ask(piece: str) -> list[int]:
        return raw.encode(piece, add_special_tokens=False).ids

    return words.WordEncoder(TWINS[kind], ask).encode(text) == ask(text)


@pytest.mark.parametrize("kind", TWINS)
def test_real_texts_are_encoded_as_by_the_library(
    kind: str, libraries: dict[str, RawTokenizer], real_texts: list[str]
) -> None:
    texts = real_texts[::3]

    assert [text for text in texts if not agrees(kind, libraries[kind], text)] == []
    assert sum(map(len, texts)) > 100_000


@pytest.mark.parametrize("kind", TWINS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(ALL_SETTLED), st.sampled_from("  \t\n\r'sSaZl9²-.")), max_size=40))
def test_any_settled_text_is_encoded_as_by_the_library(
    kind: str, libraries: dict[str, RawTokenizer], text: str
) -> None:
    assert agrees(kind, libraries[kind], text)


@pytest.mark.parametrize("kind", TWINS)
def test_every_settled_character_is_judged_as_by_the_library(kind: str, libraries: dict[str, RawTokenizer]) -> None:
    around = [f"a{char}a 1{char}1 .{char}. '{char}  {char} {char}{char}\n{char}" for char in ALL_SETTLED]

    assert [text for text in around if not agrees(kind, libraries[kind], text)] == []


def test_settled_characters_do_not_change_by_normalization() -> None:
    assert [
        char for char in ALL_SETTLED if unicodedata.normalize("NFC", char) != char or unicodedata.combining(char)
    ] == []


def test_only_lines_with_other_characters_are_left_to_the_library() -> None:
    asked: list[str] = []

    def ask(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    encoder = words.WordEncoder(words.GPT2, ask)

    encoder.encode("café “x” –\n日本\n語\nabc")

    assert asked == ["café", " “", "x", "”", " –", "\n", "日本\n語\n", "abc"]


@pytest.mark.parametrize("kind", TWINS)
@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.one_of(
            st.characters(exclude_categories=["Cs"]), st.sampled_from("  \n\n\r\u00a0\u2028\x1d\u200b\u0301sS'日1.a")
        ),
        max_size=40,
    )
)
def test_texts_of_mixed_lines_are_encoded_as_by_the_library(
    kind: str, libraries: dict[str, RawTokenizer], text: str
) -> None:
    assert agrees(kind, libraries[kind], text)


def test_the_table_is_bounded_and_long_words_are_not_kept() -> None:
    asked: list[str] = []

    def ask(word: str) -> list[int]:
        asked.append(word)
        return [0]

    encoder = words.WordEncoder(re.compile(r"[^ ]+"), ask)
    for start in range(0, words.MAX_WORDS + 2000, 1000):
        encoder.encode(" ".join(f"w{number}" for number in range(start, start + 1000)))
    assert len(encoder._look_up.__self__) <= words.MAX_WORDS
    asked.clear()
    long = "x" * (words.MAX_WORD_CHARS + 1)

    assert encoder.encode(f"{long} {long} y y") == [0, 0, 0, 0]
    assert asked == [long, long, "y"]


def test_texts_that_tokenizers_stumble_over(libraries: dict[str, RawTokenizer]) -> None:
    texts = [*NASTY, "\n".join(NASTY), "x".join(NASTY)]

    assert [(kind, text) for kind in TWINS for text in texts if not agrees(kind, libraries[kind], text)] == []


def long_texts() -> list[str]:
    """Longer than two parts: with lines and without, settled and not, and with nowhere to cut."""
    return [
        "The quick brown fox, 42 times.\nIt's    late\r\n" * 2500,
        "word " * 20_000,
        "日本語のテキスト。\n" * 8000 + "plain text again\n" * 4000,
        "x\n\n  y" * 12_000,
        "a" * 40_000,
        "\n" * 40_000,
    ]


@pytest.mark.parametrize("kind", TWINS)
def test_the_parts_of_a_long_text_are_encoded_as_by_the_library(kind: str, libraries: dict[str, RawTokenizer]) -> None:
    def ask(piece: str) -> list[int]:
        token_ids: list[int] = libraries[kind].encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return token_ids

    encoder = words.WordEncoder(TWINS[kind], ask)
    for text in long_texts():
        parts = list(encoder.encode_parts(text))

        assert [token for part in parts for token in part] == ask(text)


def test_a_long_text_has_many_parts() -> None:
    encoder = words.WordEncoder(words.SMOLLM, lambda word: [len(word)])

    assert all(len(list(encoder.encode_parts(text))) > 3 for text in long_texts()[:4])
