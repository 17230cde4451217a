"""The prompts of a request as token ids: messages through the model's chat template, texts, or ids as they are; and
what of them fits into a model's context."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from penstock.router.completions.parameters import bound_max_tokens, check_token_ids
from penstock.router.routing.request import TokenizedPrompt
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.wire.openai import MAX_CHOICES, ChatMessageIn, ChatRequest, CompletionRequest

T = TypeVar("T")

INLINE_CHARS = 8192
"""Longest text that is tokenized on the event loop; a longer one goes to a thread, for its milliseconds would hold up
every stream of this gateway."""


async def tokenize_chat(request: ChatRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """The one prompt of a chat. Raises InvalidRequest when the template refuses."""
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": _text(message)}
        for message in request.messages
    ]
    num_chars = sum(len(message["content"]) for message in messages)
    prompts = [await _run_off_loop(num_chars, partial(tokenizer.encode_chat, messages))]
    return _check_prompts(tokenizer, prompts, "messages")


async def tokenize_completion(request: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts of a legacy completion, one or several. Raises InvalidRequest for an empty prompt, a mixed array, or
    token ids that the model has not."""
    texts, token_ids = _split_prompt(request.prompt)
    if len(token_ids if token_ids is not None else texts) > MAX_CHOICES:
        raise InvalidRequest(
            f"'prompt' holds {len(request.prompt)} prompts; at most {MAX_CHOICES} are accepted.", param="prompt"
        )
    if token_ids is not None:
        return _check_prompts(tokenizer, token_ids, "prompt")
    prompts = await _run_off_loop(
        sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special=True) for text in texts]
    )
    return _check_prompts(tokenizer, prompts, "prompt")


def fit_prompt(
    token_ids: Sequence[int], sampling: SamplingParams, max_model_len: int, default_max_tokens: int
) -> TokenizedPrompt:
    """One prompt, ready to be sent to a model of that context. Raises as `bound_max_tokens` does."""
    bounded = bound_max_tokens(sampling, len(token_ids), max_model_len, default_max_tokens)
    return TokenizedPrompt(pack_token_ids(token_ids), len(token_ids), bounded)


def _split_prompt(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]] | None]:
    """The texts of a prompt and None, or no text and the token ids of each."""
    if isinstance(prompt, str):
        return [prompt], None
    texts = [item for item in prompt if isinstance(item, str)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return texts, None
    if len(token_ids) == len(prompt):
        return [], [token_ids]
    if len(lists) == len(prompt):
        return [], lists
    raise InvalidRequest("'prompt' mixes strings, token ids and arrays of token ids; use one kind.", param="prompt")


def _check_prompts(tokenizer: Tokenizer, prompts: list[list[int]], param: str) -> list[list[int]]:
    """The prompts as they are. Raises InvalidRequest for an empty one, and for token ids that the model has not: text
    may hold tokens that were added to the tokenizer only."""
    if not prompts or not all(prompts):
        raise InvalidRequest(f"'{param}' is empty: there is no token to begin with.", param=param)
    for prompt in prompts:
        check_token_ids(prompt, tokenizer.num_embedded, param)
    return prompts


def _text(message: ChatMessageIn) -> str:
    if isinstance(message.content, list):
        return "".join([part.text or "" for part in message.content])
    return message.content or ""


async def _run_off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
