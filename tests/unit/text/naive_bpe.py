"""Byte-pair encoding as in its papers, slow and plain: the oracle for byte-level and SentencePiece vocabularies.

Patterns as llama.cpp states them for its pre-tokenizer kinds (src/llama-vocab.cpp), with the `regex` module's Unicode
classes.
"""

import unicodedata
from itertools import pairwise

import regex

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3],
    "qwen2": [_LLAMA3.replace("{1,3}", "")],
}


def split(kind: str, text: str) -> list[str]:
    """Each pattern cuts the pieces that the one before left."""
    if kind == "qwen2":
        text = unicodedata.normalize("NFC", text)
    pieces = [text]
    for pattern in PATTERNS[kind]:
        pieces = [part for piece in pieces for part in _cut(pattern, piece)]
    return pieces


def _cut(pattern: str, text: str) -> list[str]:
    parts, at = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[at : match.start()], match.group()]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


class NaiveBpe:
    """Bytes that the vocabulary lacks (the demo's lacks those that never occur in its languages) are dropped, as the
    library does."""

    def __init__(self, kind: str, tokens: list[str], merges: list[str], byte_chars: dict[int, str]) -> None:
        self.kind = kind
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.byte_chars = byte_chars
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        return [index for word in split(self.kind, text) for index in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self.known:
            parts = [char for byte in word.encode() if (char := self.byte_chars[byte]) in self.ids]
            if self.kind == "llama-bpe" and "".join(parts) in self.ids:
                parts = ["".join(parts)]
            while pairs := [(self.ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in self.ranks]:
                _, at = min(pairs)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            self.known[word] = [self.ids[part] for part in parts]
        return self.known[word]


def sentencepiece(tokens: list[str], scores: list[float], text: str, has_prefix: bool) -> list[int]:
    """SentencePiece's BPE: of all adjacent pairs that make a token, merge the best-scored, leftmost first; unknown
    characters as bytes."""
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list((" " + text if has_prefix else text).replace(" ", "▁"))
    while pairs := [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        index
        for part in parts
        for index in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]
