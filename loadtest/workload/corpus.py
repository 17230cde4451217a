"""Real text: JSON lines with a `prompt`, `question`, `text` or `turns`, whose rows are prompts, or plain text, from
which prompts are cut."""

import re
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import numpy as np
from tokenizers import Tokenizer

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.workload.lines import make_line_error, read_json, read_lines

TOKENS_PER_WORD: Final = 4 / 3
"""Ratio for English prose in the usual vocabularies, with its punctuation: by it plain text is cut without a
tokenizer."""

_WORD: Final = re.compile(r"\S+")

Text = Annotated[str, msgspec.Meta(min_length=1)]


class CorpusLine(msgspec.Struct):
    """The first field that is there counts."""

    turns: Annotated[list[Text], msgspec.Meta(min_length=1)] | None = None
    prompt: Text | None = None
    question: Text | None = None
    text: Text | None = None

    @property
    def all_turns(self) -> list[str] | None:
        one = self.prompt or self.question or self.text
        return self.turns or (None if one is None else [one])


class Corpus:
    """Rows (one or more turns each) or plain text, all held in memory."""

    def __init__(self, rows: list[list[str]], plain: str, seed: int, tokenizer: Tokenizer | None) -> None:
        self._rows = rows
        self._plain = plain
        self._seed = seed
        self._tokenizer = tokenizer
        self._order = np.random.default_rng(seed).permutation(len(rows)).tolist()

    @classmethod
    def read(cls, path: Path, seed: int, tokenizer: Tokenizer | None = None) -> Self:
        """A name in .jsonl or .json, gzip or not, is one of JSON lines; any other is plain text. Raises
        TraceInvalid."""
        is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
        rows = _read_rows(path) if is_json else []
        plain = "" if is_json else "\n".join(line.decode("utf-8", "replace") for _, line in read_lines(path))
        if not rows and not plain:
            raise TraceInvalid(f"{path} holds no text.")
        return cls(rows, plain, seed, tokenizer)

    def turns(self, index: int, tokens: int) -> list[str]:
        """The index-th prompt's turns; of plain text one passage of so many tokens, which begins at any word."""
        if self._rows:
            return self._rows[self._order[index % len(self._order)]]
        start = int(np.random.default_rng([self._seed, index]).integers(len(self._plain)))
        return [self._passage(start, tokens)]

    def _passage(self, start: int, tokens: int) -> str:
        """Text from the first whole word behind `start`; at the end it goes on from the beginning."""
        space = re.compile(r"\s").search(self._plain, start)
        begin = space.end() if space else 0
        chars = 16 * tokens
        text = self._plain[begin : begin + chars]
        while len(text) < chars:
            text += ("\n" if text else "") + self._plain[: chars - len(text)]
        if self._tokenizer is not None:
            return _cut(text.lstrip(), tokens, self._tokenizer)
        words = max(1, round(tokens / TOKENS_PER_WORD))
        ends = [match.end() for match in islice(_WORD.finditer(text), words)]
        return text[: ends[-1]].lstrip()


def _read_rows(path: Path) -> list[list[str]]:
    rows = []
    for number, line in read_json(path, msgspec.json.Decoder(CorpusLine)):
        turns = line.all_turns
        if turns is None:
            raise make_line_error(path, number, "none of the fields turns, prompt, question, text")
        rows.append(turns)
    return rows


def _cut(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """The beginning of `text` with `tokens` tokens; some more where a character of several tokens, such as an emoji,
    would be cut."""
    ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
    return text[: ends[min(tokens, len(ends)) - 1]]
