"""Tokens and words that an answer may not have (`allowed_token_ids`, `bad_words`), as the engine takes them.

A word is what its tokens are: at the beginning of a text and behind a space, where these are other tokens, as in vLLM
(`SamplingParams.update_from_tokenizer`). The engine never lets the last of them follow the others, so a word that comes
by other tokens still comes. Many words are tokenized in a thread, in the tenant's turn.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.parameters import check_token_ids
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.wire.openai import ChatRequest, CompletionRequest

INLINE_CHARS = 1024
"""Characters of words that are tokenized on the event loop."""

Words = tuple[tuple[int, ...], ...]


async def mask_tokens(
    sampling: SamplingParams,
    request: ChatRequest | CompletionRequest,
    tokenizer: Tokenizer,
    threads: FairThreads,
    tenant: str,
) -> SamplingParams:
    """The parameters with the request's masks. Raises InvalidRequest for token ids that the model has not, and where no
    token is left."""
    if request.allowed_token_ids is None and not request.bad_words:
        return sampling
    allowed = request.allowed_token_ids or []
    check_token_ids(allowed, tokenizer.vocab_size, "allowed_token_ids")
    words = await _read_words(request.bad_words or [], tokenizer, threads, tenant)
    masked = msgspec.structs.replace(sampling, allowed_token_ids=pack_token_ids(allowed), bad_words=words)
    _check_left(masked, allowed, tokenizer)
    return masked


async def _read_words(texts: Sequence[str], tokenizer: Tokenizer, threads: FairThreads, tenant: str) -> Words:
    num_chars = sum(map(len, texts))
    read = partial(_tokens_of_words, texts, tokenizer)
    return read() if num_chars <= INLINE_CHARS else await threads.run(tenant, 2 * num_chars, read)


def _tokens_of_words(texts: Sequence[str], tokenizer: Tokenizer) -> Words:
    """Raises InvalidRequest for a word of no token, or of tokens that the model has not."""
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        alone = tuple(tokenizer.encode(text.lstrip(), add_special=False))
        if not alone:
            raise InvalidRequest("'bad_words' holds a word without a token.", param="bad_words")
        behind_space = tuple(tokenizer.encode(f" {text.lstrip()}", add_special=False))
        found[alone] = None
        if behind_space[0] != alone[0] and len(behind_space) == len(alone):
            found[behind_space] = None
    for word in found:
        check_token_ids(word, tokenizer.num_embedded, "bad_words")
    return tuple(found)


def _check_left(sampling: SamplingParams, allowed: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest where no allowed token could ever be the first."""
    if not allowed:
        return
    never = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        never |= {*tokenizer.eos_token_ids, *sampling.stop_token_ids}
    if never.issuperset(allowed):
        raise InvalidRequest(
            "No token is left: all of 'allowed_token_ids' are excluded by 'bad_words' or 'min_tokens'.",
            param="allowed_token_ids",
        )
