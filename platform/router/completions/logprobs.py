"""Log probabilities in OpenAI's two formats. Pure."""

from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import TokenLogprobs
from penstock.wire.openai import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob

MIN_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely"; JSON has no infinity."""


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    content = []
    for token_id, item in zip(token_ids, logprobs, strict=True):
        data = tokenizer.token_bytes[token_id]
        content.append(
            TokenLogprob(_text(data), finite(item.logprob), list(data), [_top(tokenizer, *top) for top in item.top])
        )
    return ChatLogprobs(content)


def text_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> TextLogprobs:
    """Log probabilities of a legacy completion; the chosen token is always among the top ones, as in OpenAI's API. The
    first token of a prompt has none."""
    tokens = [_name(tokenizer.token_bytes[token_id]) for token_id in token_ids]
    chosen = [None if item is None else finite(item.logprob) for item in logprobs]
    tops: list[dict[str, float] | None] = []
    for token, logprob, item in zip(tokens, chosen, logprobs, strict=True):
        if item is None or logprob is None:
            tops.append(None)
            continue
        top = {_name(tokenizer.token_bytes[token_id]): finite(value) for token_id, value in item.top}
        top.setdefault(token, logprob)
        tops.append(top)
    return TextLogprobs(tokens, chosen, tops, list(offsets))


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes[token_id]
    return TopLogprob(_text(data), finite(logprob), list(data))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _name(data: bytes) -> str:
    """Name of a token: its text, or its bytes where they are no text, for names are keys and must not all be U+FFFD."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A logarithm as JSON can have it."""
    return max(logprob, MIN_LOGPROB)
