"""Text that comes in pieces equals the text of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer
from tests.unit.text.conftest import NASTY


@pytest.fixture(scope="module")
def library(demo_tokenizer: Tokenizer) -> RawTokenizer:
    return demo_tokenizer._head


def streamed(tokenizer: Tokenizer, ids: list[int], step: int = 1, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step)] + [detokenizer.finish()]


def test_half_a_character_is_never_emitted(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("👋日", False)
    assert len(ids) > 2

    pieces = streamed(demo_tokenizer, ids)

    assert "".join(pieces) == "👋日"
    assert [piece for piece in pieces if "\ufffd" in piece] == []


def test_a_character_never_completed_becomes_a_replacement_at_the_end(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("a👋", False)[:-1]
    detokenizer = Detokenizer(demo_tokenizer)

    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_special_tokens_are_left_out_or_shown(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode("<|im_start|>a<|im_end|>", False)

    assert "".join(streamed(demo_tokenizer, ids)) == "a"
    assert "".join(streamed(demo_tokenizer, ids, skip_special=False)) == "<|im_start|>a<|im_end|>"


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151)), max_size=30),
    step=st.integers(1, 4),
    skip_special=st.booleans(),
)
def test_any_ids_give_what_the_library_decodes(
    demo_tokenizer: Tokenizer, library: RawTokenizer, ids: list[int], step: int, skip_special: bool
) -> None:
    whole = "".join(streamed(demo_tokenizer, ids, step, skip_special))

    assert whole == demo_tokenizer.decode(ids, skip_special)
    assert whole == library.decode(ids, skip_special_tokens=skip_special)


def test_real_texts_come_back(demo_tokenizer: Tokenizer, real_texts: list[str]) -> None:
    texts = [
        text for text in [*NASTY, *real_texts[::10]] if "\x1d" not in text
    ]  # the demo's vocabulary has no token for that byte

    for text in texts:
        assert "".join(streamed(demo_tokenizer, demo_tokenizer.encode(text, False), skip_special=False)) == text
