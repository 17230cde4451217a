"""Prompts of tokens that a model cannot read: a tokenizer may know more of them than the embedding has rows for."""

from collections.abc import Awaitable

import pytest

from penstock.router.completions.prompts import tokenize_chat, tokenize_completion
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatMessageIn, ChatRequest, CompletionRequest
from tests.unit.router.http_fakes import IM_START, VOCAB_SIZE, byte_tokenizer


@pytest.fixture
def short_of_one() -> Tokenizer:
    """A tokenizer whose last token, the end of a turn, is not in the model."""
    tokenizer = byte_tokenizer()
    tokenizer.num_embedded = VOCAB_SIZE - 1
    return tokenizer


async def refused(prompts: Awaitable[list[list[int]]]) -> InvalidRequest:
    with pytest.raises(
        InvalidRequest, match=rf"holds {VOCAB_SIZE - 1}; this model's token ids lie in 0\.\.{VOCAB_SIZE - 2}"
    ) as caught:
        await prompts
    return caught.value


async def test_ids_texts_and_turns_beyond_the_embedding_are_refused(short_of_one: Tokenizer) -> None:
    ids = CompletionRequest(model="m", prompt=[IM_START, VOCAB_SIZE - 1])
    text = CompletionRequest(model="m", prompt="a<|im_end|>")
    chat = ChatRequest(model="m", messages=[ChatMessageIn(role="user", content="a")])

    assert (await refused(tokenize_completion(ids, short_of_one))).param == "prompt"
    assert (await refused(tokenize_completion(text, short_of_one))).param == "prompt"
    assert (await refused(tokenize_chat(chat, short_of_one))).param == "messages"


async def test_what_the_embedding_has_is_accepted(short_of_one: Tokenizer) -> None:
    request = CompletionRequest(model="m", prompt=[IM_START, 7])

    assert await tokenize_completion(request, short_of_one) == [[IM_START, 7]]
