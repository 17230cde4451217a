"""The tokens that a grammar leaves of a real vocabulary: exactly those whose bytes go on with the text, in every kind
of vocabulary; and compiled grammars, which are kept for the tenant that sent them."""

import json
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from penstock.text.source import resolve
from penstock.text.token_bytes import bytes_of_tokens
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from penstock.workers.compute.grammar import compiler as compiler_module
from penstock.workers.compute.grammar.compiler import GrammarCompiler, TokenTexts

TEXTS = ["café au lait", "café 😀", "the world\n\t<|im_end|>", "x"]
"""Characters of one to four bytes, tokens that begin inside of them, and the name of a special token."""
CHOICE = Constraint("choice", json.dumps(TEXTS))


@cache
def byte_level() -> TokenTexts:
    return load_tokenizer(resolve("demo"))


@cache
def sentencepiece() -> TokenTexts:
    pieces = ["▁the", "▁wor", "ld", "▁au", "caf", "é", "▁", "la", "it", "x", "▁the▁wor"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    raw = RawTokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in words[:3]])
    tokens: Any = SimpleNamespace(
        token_bytes=bytes_of_tokens(raw, len(words)), special_ids=frozenset({0, 1, 2}), eos_token_ids=frozenset({2})
    )
    return tokens


@pytest.mark.parametrize("texts", [byte_level, sentencepiece])
@pytest.mark.parametrize("padding", [0, 40])
def test_the_tokens_that_may_follow_are_those_whose_bytes_go_on_with_a_text(
    texts: Callable[[], TokenTexts], padding: int
) -> None:
    tokens = texts()
    size = len(tokens.token_bytes) + padding
    compiler = GrammarCompiler(lambda: tokens, size)
    wanted = [text.encode() for text in TEXTS]

    for target in wanted:
        matcher, output, done = compiler.compile(CHOICE, "t", []), list[int](), b""
        while done != target:
            allowed, may_end = matcher.allowed()
            expected = {
                index
                for index, data in enumerate(tokens.token_bytes)
                if data and index not in tokens.special_ids and any(text.startswith(done + data) for text in wanted)
            }
            assert set(allowed.row().nonzero()[0].tolist()) == expected
            assert len(allowed.row()) == size
            assert not may_end
            # the shortest piece, so that most places are looked at
            token_id = min(
                (index for index in expected if target.startswith(done + tokens.token_bytes[index])),
                key=lambda index: len(tokens.token_bytes[index]),
            )
            output.append(token_id)
            done += tokens.token_bytes[token_id]
            matcher.go_to(output)
        assert matcher.is_complete


def test_a_vocabulary_that_is_larger_than_the_models_logits_is_cut() -> None:
    tokens = sentencepiece()
    matcher = GrammarCompiler(lambda: tokens, 260).compile(CHOICE, "t", [])

    allowed, _ = matcher.allowed()

    assert len(allowed.row()) == 260
    assert set(allowed.row().nonzero()[0].tolist()) == {3 + ord("c"), 3 + ord("t"), 3 + ord("x")}


def test_a_grammar_is_compiled_once_for_each_tenant_and_each_answer_has_a_state_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = CountingCompiler(sentencepiece, 300)
    first, second = (compiler.compile(CHOICE, "a", []) for _ in range(2))
    compiler.compile(CHOICE, "b", [])
    first.go_to([3 + ord("x")])

    assert compiler.num_compiled == 2
    assert first.is_complete
    assert not second.is_complete
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    for tenant in ("c", "b", "a"):
        compiler.compile(CHOICE, tenant, [])
    assert compiler.num_compiled == 4  # that of "a" had given way


def test_the_tokenizer_is_read_when_the_first_constraint_comes() -> None:
    num_read = 0

    def read() -> TokenTexts:
        nonlocal num_read
        num_read += 1
        return sentencepiece()

    compiler = GrammarCompiler(read, 300)
    assert num_read == 0
    compiler.compile(CHOICE, "a", [])
    compiler.compile(Constraint("regex", "a"), "a", [])

    assert num_read == 1


def test_what_can_not_be_compiled_is_told() -> None:
    compiler = GrammarCompiler(sentencepiece, 300)

    with pytest.raises(InvalidRequest, match="regex"):
        compiler.compile(Constraint("regex", "(a"), "t", [])
    with pytest.raises(InvalidRequest, match="does not fit"):
        compiler.compile(CHOICE, "t", [3 + ord("z")])


class CountingCompiler(GrammarCompiler):
    num_compiled = 0

    def _compile(self, constraint: Constraint) -> Any:
        self.num_compiled += 1
        return super()._compile(constraint)
