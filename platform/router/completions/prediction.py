"""A chat's prediction of its answer as token ids: drafts for engines that speculate. It changes when an answer comes,
never its tokens.

What can't be of use is not read: of a long prediction only the beginning, and none where nothing of it is text.
"""

from functools import partial
from itertools import takewhile

from penstock.router.completions.prompts import Reader
from penstock.text.draft import Cut
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import pack_token_ids
from penstock.wire.openai import ChatRequest, CompletionRequest

MAX_TOKENS = 16384
"""Tokens of a prediction that are sent to a replica."""


async def read_prediction(request: ChatRequest | CompletionRequest, reader: Reader) -> bytes:
    """Packed ids of the prediction; empty where there is none. Raises InvalidRequest for content that is not text."""
    text = _text_of(request)
    if not text:
        return b""
    [token_ids] = await reader.run(len(text), partial(_encode, text, reader.tokenizer))
    return pack_token_ids(token_ids)


def _text_of(request: ChatRequest | CompletionRequest) -> str:
    if isinstance(request, CompletionRequest) or request.prediction is None:
        return ""
    content = request.prediction.content
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                "A prediction consists of text, a string or parts of type 'text'.",
                param=f"prediction.content[{number}]",
            )
    return "".join([part.text or "" for part in content])


def _encode(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    token_ids = tokenizer.encode(text, add_special=False, cut=Cut(MAX_TOKENS, keeps_end=False))
    # tokens that were added to the tokenizer only are none that the model can read, or choose
    known = takewhile(lambda token_id: token_id < tokenizer.num_embedded, token_ids)
    return [list(known)]
