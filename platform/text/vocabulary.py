"""A checkpoint's vocabulary as a `tokenizers.Tokenizer` plus what that object lacks: bos, eos, special ids.

Read from tokenizer.json as it stands, or built from GGUF metadata. GGUF names its pre-tokenizer by a word (llama.cpp's
`tokenizer.ggml.pre`); the words supported are in `PRE_TOKENIZERS`, any other is refused by name, because a near miss
would tokenize almost right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from penstock.base.errors import ConfigError
from penstock.text.gguf_header import GgufHeader
from penstock.text.source import ModelSource

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>"})
"""Special tokens that end an assistant's turn whatever the checkpoint declares as its eos."""


class _Kind(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer of the library, and what is known of its ids."""

    raw: RawTokenizer
    size: int
    """Token ids lie in [0, size); padded to the model's logits."""
    num_embedded: int
    """Ids below this are in the model's embedding. Tokens that somebody added to the tokenizer alone are not."""
    eos_token_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    """Token ids before a text when special tokens are added (bos)."""
    suffix_ids: tuple[int, ...]
    """Token ids behind a text when special tokens are added (eos, in some)."""
    special_tokens: dict[str, str]
    """bos_token, eos_token and so on, as chat templates want them."""


def load_vocabulary(source: ModelSource) -> Vocabulary:
    """The vocabulary of a checkpoint. Raises ConfigError when the tokenizer is missing, malformed or of a kind that is
    not supported."""
    return _from_gguf(source) if source.format == "gguf" else _from_directory(source)


# --- tokenizer.json


def _from_directory(source: ModelSource) -> Vocabulary:
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{source.path} has no tokenizer.json; a SentencePiece tokenizer.model alone is not supported"
            " (transformers' save_pretrained writes one)"
        )
    try:
        raw = RawTokenizer.from_file(str(path))
    except Exception as error:  # the extension raises bare Exception, no class of its own
        raise ConfigError(f"can't read {path}: {error}") from error
    raw.no_truncation()
    raw.no_padding()
    settings = source.read_json("tokenizer_config.json") or {}
    named = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    prefix, suffix = _affixes(raw)
    declared = _ids(source.config.get("vocab_size"))
    size = max(raw.get_vocab_size(with_added_tokens=True), *declared, 1)
    return Vocabulary(
        raw=raw,
        size=size,
        num_embedded=min([size, *declared]),
        eos_token_ids=_declared_eos(source, raw, named["eos_token"]) | _turn_ends(raw),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens={name: text for name, text in named.items() if text is not None},
    )


def _content(token: Any) -> str | None:
    """Text of a token of tokenizer_config.json, which spells it as text or as an AddedToken object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _declared_eos(source: ModelSource, raw: RawTokenizer, eos_token: str | None) -> frozenset[int]:
    declared = _ids((source.read_json("generation_config.json") or {}).get("eos_token_id")) or _ids(
        source.config.get("eos_token_id")
    )
    from_text = raw.token_to_id(eos_token) if eos_token else None
    return frozenset(declared if from_text is None else [*declared, from_text])


def _turn_ends(raw: RawTokenizer) -> frozenset[int]:
    return frozenset(
        index
        for index, token in raw.get_added_tokens_decoder().items()
        if token.special and token.content in END_OF_TURN
    )


def _affixes(raw: RawTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and behind a text."""
    bare, full = raw.encode("a", add_special_tokens=False).ids, raw.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ConfigError("the tokenizer's post-processor changes the text itself, which is not supported")


# --- GGUF


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False), _byte_level(use_regex=False)]
    )


def _smollm(raw: RawTokenizer) -> None:
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


def _gpt2(raw: RawTokenizer) -> None:
    raw.pre_tokenizer = _byte_level(use_regex=True)


def _llama3(raw: RawTokenizer) -> None:
    raw.pre_tokenizer = _split(LLAMA3_PATTERN)
    raw.model.ignore_merges = True


def _qwen2(raw: RawTokenizer) -> None:
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _split(QWEN2_PATTERN)


PRE_TOKENIZERS: dict[str, Callable[[RawTokenizer], None]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
}


def _from_gguf(source: ModelSource) -> Vocabulary:
    header = source.gguf
    tokens, kinds = header.texts("tokenizer.ggml.tokens"), header.integers("tokenizer.ggml.token_type")
    if not tokens or len(kinds) != len(tokens):
        raise ConfigError(
            f"{source.path} holds {len(tokens)} tokens and {len(kinds)} token types; a tokenizer needs one type for"
            " each token"
        )
    model = header.text("tokenizer.ggml.model")
    if model == "gpt2":
        raw, adds_bos = _byte_level_bpe(header, tokens), header.text("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    elif model == "llama":
        raw, adds_bos = _sentencepiece(header, tokens), True
    else:
        raise ConfigError(
            f"{source.path} has a tokenizer of the kind {model!r}; supported are gpt2 (byte-level BPE) and llama"
            " (SentencePiece BPE)"
        )
    raw.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind == _Kind.CONTROL
        ]
    )
    raw.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind == _Kind.USER_DEFINED
        ]
    )
    return _gguf_vocabulary(header, raw, tokens, adds_bos)


def _gguf_vocabulary(header: GgufHeader, raw: RawTokenizer, tokens: list[str], adds_bos: bool) -> Vocabulary:
    """The vocabulary with what the GGUF metadata declares. adds_bos: llama.cpp's default for this kind of tokenizer,
    where the file does not declare it."""
    ids = {
        name: header.integer(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    bos, eos = ids["bos"], ids["eos"]
    declared_bos = header.flag("tokenizer.ggml.add_bos_token")
    has_bos = bos is not None and (adds_bos if declared_bos is None else declared_bos)
    has_eos = eos is not None and bool(header.flag("tokenizer.ggml.add_eos_token"))
    names = {"bos_token": bos, "eos_token": eos, "unk_token": ids["unknown"], "pad_token": ids["padding"]}
    return Vocabulary(
        raw=raw,
        size=len(tokens),
        num_embedded=min(
            [len(tokens), *(tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight")]
        ),
        eos_token_ids=frozenset(index for index in (eos, ids["eot"], ids["eom"]) if index is not None)
        | _turn_ends(raw),
        prefix_ids=(bos,) if has_bos and bos is not None else (),
        suffix_ids=(eos,) if has_eos and eos is not None else (),
        special_tokens={
            name: tokens[index] for name, index in names.items() if index is not None and index < len(tokens)
        },
    )


def _byte_level_bpe(header: GgufHeader, tokens: list[str]) -> RawTokenizer:
    kind = header.text("tokenizer.ggml.pre")
    if kind not in PRE_TOKENIZERS:
        raise ConfigError(
            f"the GGUF's pre-tokenizer {kind!r} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in header.texts("tokenizer.ggml.merges"))
    ]
    raw = RawTokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    raw.decoder = decoders.ByteLevel()
    PRE_TOKENIZERS[kind](raw)
    return raw


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> RawTokenizer:
    """SentencePiece BPE: of all adjacent pairs whose concatenation is a token, the one with the best score is merged
    first."""
    scores = header.floats("tokenizer.ggml.scores")
    unknown = header.integer("tokenizer.ggml.unknown_token_id") or 0
    if len(scores) != len(tokens):
        raise ConfigError(
            f"the GGUF holds {len(tokens)} tokens and {len(scores)} scores; a SentencePiece tokenizer needs one score"
            " for each token"
        )
    vocab = {text: index for index, text in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    raw = RawTokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if header.flag("tokenizer.ggml.add_space_prefix") is not False:
        steps.insert(0, normalizers.Prepend("▁"))
    raw.normalizer = normalizers.Sequence(steps)
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    found = [
        (-scores[index], vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text, index in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]
