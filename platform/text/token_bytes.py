"""The bytes that each token stands for, in byte-level and SentencePiece vocabularies.

Byte-level (GPT-2): every byte is written as one printable character, by the table of OpenAI's encoder.py (printable
Latin-1 bytes are themselves, the other 68 follow from U+0100 on). SentencePiece: U+2581 is a space, and <0xHH> is a
byte.
"""

import json
import re

from tokenizers import Tokenizer as RawTokenizer

from penstock.base.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def bytes_of_tokens(raw: RawTokenizer, size: int) -> list[bytes]:
    """Bytes by token id, `size` of them; ids without a token (padding of the logits) have none. ConfigError for other
    kinds of vocabulary."""
    kinds = _decoder_kinds(raw)
    special = {index for index, token in raw.get_added_tokens_decoder().items() if token.special}
    vocabulary = raw.get_vocab(with_added_tokens=True)
    if "ByteLevel" in kinds:
        table = _byte_of_char()
        known = {index: _byte_level(text, table) for text, index in vocabulary.items()}
    elif kinds & {"ByteFallback", "Metaspace"}:
        known = {
            index: text.encode() if index in special else _sentencepiece(text) for text, index in vocabulary.items()
        }
    else:
        raise ConfigError(
            f"a tokenizer that decodes by {', '.join(sorted(kinds)) or 'nothing'} is not supported; supported are"
            " byte-level BPE and SentencePiece"
        )
    return [known.get(index, b"") for index in range(size)]


def _decoder_kinds(raw: RawTokenizer) -> set[str]:
    if raw.decoder is None:
        return set()
    state = json.loads(raw.decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}


def _byte_level(text: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[char] for char in text])
    except KeyError:  # an added token is written as it is
        return text.encode()


def _sentencepiece(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
