"""What a request wants read, as token ids: messages through the model's chat template, texts, or ids as they are."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from penstock.router.completions.parameters import check_token_ids
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import MAX_CHOICES, ChatMessageIn, ChatRequest, CompletionRequest

T = TypeVar("T")

INLINE_CHARS = 8192
"""A longer text is tokenized in a thread: its milliseconds would hold up every stream of this gateway."""


async def chat_prompt(tokenizer: Tokenizer, request: ChatRequest) -> list[list[int]]:
    """One prompt. Raises InvalidRequest when the template refuses."""
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": _text(message)}
        for message in request.messages
    ]
    size = sum(len(message["content"]) for message in messages)
    prompts = [await _off_loop(size, lambda: tokenizer.encode_chat(messages))]
    return _checked(tokenizer, prompts, "messages")


async def completion_prompts(tokenizer: Tokenizer, request: CompletionRequest) -> list[list[int]]:
    """Raises InvalidRequest for an empty prompt, a mixed array, or token ids that the model has not."""
    texts, ids = _texts_or_ids(request.prompt)
    if len(ids if ids is not None else texts) > MAX_CHOICES:
        raise InvalidRequest(
            f"'prompt' holds {len(request.prompt)} prompts; at most {MAX_CHOICES} are accepted.", param="prompt"
        )
    if ids is not None:
        return _checked(tokenizer, ids, "prompt")
    prompts = await _off_loop(
        sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special=True) for text in texts]
    )
    return _checked(tokenizer, prompts, "prompt")


def _texts_or_ids(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]] | None]:
    """Either texts and None, or nothing and ids."""
    if isinstance(prompt, str):
        return [prompt], None
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return texts, None
    if len(ids) == len(prompt):
        return [], [ids]
    if len(lists) == len(prompt):
        return [], lists
    raise InvalidRequest("'prompt' mixes strings, token ids and arrays of token ids; use one kind.", param="prompt")


def _checked(tokenizer: Tokenizer, prompts: list[list[int]], param: str) -> list[list[int]]:
    """Text may hold tokens that were added to the tokenizer and not to the model."""
    if not prompts or not all(prompts):
        raise InvalidRequest(f"'{param}' is empty: there is no token to begin with.", param=param)
    for prompt in prompts:
        check_token_ids(prompt, tokenizer.num_embedded, param)
    return prompts


def _text(message: ChatMessageIn) -> str:
    if isinstance(message.content, list):
        return "".join([part.text or "" for part in message.content])
    return message.content or ""


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
