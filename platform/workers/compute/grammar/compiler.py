"""The compiler of constraints: they become matchers over a model's vocabulary.

The vocabulary is llguidance's: the bytes of each token as `text.tokenizer` has them, so that what is matched is the
very text of the answer; special tokens stand for no text. It is made when the first constraint comes, since most
replicas never need it. Compiled grammars are kept, each for the tenant that sent it: nobody learns from the time of an
answer what others have sent.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.text.grammar import LIMITS, describe, grammar_of
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from penstock.workers.compute.grammar.matcher import GrammarFault, Matcher

MAX_KEPT = 32
"""Compiled grammars that are kept."""
_END = b"\xff<|end of answer|>"

_Key = tuple[str, str, str]
"""Tenant, kind and text of a constraint."""


class TokenTexts(Protocol):
    """The part of `penstock.text.tokenizer.Tokenizer` that a vocabulary is made of."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def special_ids(self) -> Set[int]: ...
    @property
    def eos_token_ids(self) -> Set[int]: ...


class _Vocabulary:
    """What llguidance's wrapper wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        """Never asked: no grammar of ours forces tokens."""
        raise NotImplementedError(f"nothing of {len(text)} bytes is to be tokenized")


class GrammarCompiler:
    """Compiles constraints, in any thread."""

    def __init__(self, load_tokenizer: Callable[[], TokenTexts], vocab_size: int) -> None:
        """load_tokenizer: called once, by the first compilation. vocab_size: of the model's logits."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    def compile(self, constraint: Constraint, tenant: str, output: Sequence[int]) -> Matcher:
        """A matcher behind the tokens `output`, whose first mask is computed. Raises InvalidRequest for a constraint
        that can't be enforced, exceeds a limit or does not fit the output, ConfigError where the checkpoint has no
        tokenizer."""
        key = (tenant, constraint.kind, constraint.text)
        kept = self._find(key)
        try:
            if kept is not None:
                return self._begin(kept, output)
        except GrammarFault:  # copies share what their lexers have found, and others may have reached the limit of that
            self._forget(key)
        try:
            return self._begin(self._keep(key, self._compile(constraint)), output)
        except GrammarFault as fault:
            self._forget(key)
            raise InvalidRequest(str(fault)) from fault

    def _begin(self, compiled: LLMatcher, output: Sequence[int]) -> Matcher:
        matcher = Matcher(compiled.deep_copy(), self._vocab_size)
        matcher.go_to(output)
        if not matcher.is_complete:
            matcher.allowed()
        return matcher

    def _find(self, key: _Key) -> LLMatcher | None:
        with self._keeping:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: _Key, compiled: LLMatcher) -> LLMatcher:
        with self._keeping:
            self._kept[key] = compiled
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _forget(self, key: _Key) -> None:
        with self._keeping:
            self._kept.pop(key, None)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary(), grammar_of(constraint), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"The answer's constraint can't be enforced. {describe(matcher.get_error())}")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = make_vocabulary(self._load_tokenizer(), self._vocab_size)
            return self._tokenizer


def make_vocabulary(tokenizer: TokenTexts, vocab_size: int) -> LLTokenizer:
    """llguidance's vocabulary of a model: the tokens' bytes, none for ids that the tokenizer has not, and behind them
    an id that only stands for the end of an answer. A model's own ends of sequence are special tokens like others."""
    tokens = tokenizer.token_bytes[:vocab_size]
    tokens = [*tokens, *[b""] * (vocab_size - len(tokens)), _END]
    special = sorted(index for index in tokenizer.special_ids | tokenizer.eos_token_ids if index < vocab_size)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special, vocab_size)))
