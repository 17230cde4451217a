"""Looked up parts are the JSON of the detokenized text."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.detokenizer import Detokenizer
from penstock.text.json_parts import JsonParts
from penstock.text.tokenizer import Tokenizer


@settings(max_examples=300, deadline=None)
@given(
    deltas=st.lists(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151)), max_size=4), max_size=12),
    skip_special=st.booleans(),
)
def test_a_delta_whose_parts_are_joined_says_what_the_detokenizer_says(
    demo_tokenizer: Tokenizer, deltas: list[list[int]], skip_special: bool
) -> None:
    oracle, subject = Detokenizer(demo_tokenizer, skip_special), Detokenizer(demo_tokenizer, skip_special)

    for token_ids in deltas:
        expected = msgspec.json.encode(oracle.push(token_ids))
        parts = subject.json_parts()
        joined = None if parts is None else parts.join(token_ids)
        said = msgspec.json.encode(subject.push(token_ids)) if joined is None else b'"' + joined + b'"'

        assert said == expected
    assert subject.finish() == oracle.finish()


def test_half_a_character_has_no_part_and_nothing_is_looked_up_behind_one(demo_tokenizer: Tokenizer) -> None:
    first, *rest = demo_tokenizer.encode("👋", False)
    detokenizer = Detokenizer(demo_tokenizer)
    parts = detokenizer.json_parts()
    assert parts is not None
    assert parts.join([first]) is None

    detokenizer.push([first])
    assert detokenizer.json_parts() is None
    detokenizer.push(rest)

    assert detokenizer.json_parts() is parts


def test_a_part_is_made_once_and_is_the_bytes_themselves_where_json_changes_nothing() -> None:
    table = [b"plain", b'"\n\x01', b"\xf0\x9f", b"", "\u00e9".encode()]
    parts = JsonParts(table)

    assert [parts.join([index]) for index in range(5)] == [b"plain", b'\\"\\n\\u0001', None, b"", "\u00e9".encode()]
    assert parts.join([0, 1, 4]) == b'plain\\"\\n\\u0001' + "\u00e9".encode()
    assert parts.made[0] is table[0]
    assert parts.made[2] is None


def test_tokenizers_of_one_checkpoint_share_their_parts(demo_tokenizer: Tokenizer) -> None:
    changed = demo_tokenizer.with_reasoning_parser("qwen3")

    assert Detokenizer(changed).json_parts() is Detokenizer(demo_tokenizer).json_parts()
    assert Detokenizer(changed, skip_special=False).json_parts() is not Detokenizer(changed).json_parts()
