from typing import Any

import pytest

from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.token_masks import INLINE_CHARS, mask_tokens
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import SamplingParams, unpack_token_ids
from penstock.wire.openai import CompletionRequest
from tests.unit.router.http_fakes import IM_END, TOKENIZER, VOCAB_SIZE


async def masks(threads: FairThreads | None = None, **fields: Any) -> SamplingParams:
    request = CompletionRequest(model="m", prompt="x", **fields)
    sampling = SamplingParams(max_tokens=9, min_tokens=request.min_tokens or 0)
    return await mask_tokens(sampling, request, TOKENIZER, threads or FairThreads(), "t")


async def error_of(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await masks(**fields)
    return caught.value


async def test_tokens_and_words_become_what_the_engine_takes() -> None:
    masked = await masks(allowed_token_ids=[7, 257], bad_words=["no", " No", "no"])

    assert unpack_token_ids(masked.allowed_token_ids) == [7, 257]
    assert masked.bad_words == ((110, 111), (78, 111))


async def test_a_request_without_masks_keeps_its_parameters() -> None:
    assert await masks() == SamplingParams(max_tokens=9)
    assert await masks(bad_words=[]) == SamplingParams(max_tokens=9)


class Spaced:
    """A tokenizer to which a word behind a space is another token."""

    num_embedded = vocab_size = 100
    eos_token_ids = frozenset({2})
    words = {"no": [5], " no": [6], "maybe": [7, 8], " maybe": [9, 10, 8], "well": [11, 12], " well": [11, 13]}

    def encode(self, text: str, add_special: bool) -> list[int]:
        assert not add_special
        return self.words[text]


async def test_a_word_counts_behind_a_space_where_it_is_as_many_other_tokens() -> None:
    request = CompletionRequest(model="m", prompt="x", bad_words=["no", "maybe", "well"])
    tokenizer: Any = Spaced()
    masked = await mask_tokens(SamplingParams(max_tokens=9), request, tokenizer, FairThreads(), "t")

    assert masked.bad_words == ((5,), (6,), (7, 8), (11, 12))


async def test_what_leaves_nothing_or_does_not_exist_is_refused() -> None:
    assert (await error_of(allowed_token_ids=[VOCAB_SIZE])).param == "allowed_token_ids"
    assert (await error_of(allowed_token_ids=[IM_END], min_tokens=1)).param == "allowed_token_ids"
    assert (await error_of(allowed_token_ids=[97], bad_words=["a"])).param == "allowed_token_ids"
    assert (await error_of(bad_words=["  "])).param == "bad_words"
    await masks(allowed_token_ids=[97, 98], bad_words=["a"])


async def test_many_words_are_read_in_a_thread() -> None:
    seen: list[str] = []

    class Noted(FairThreads):
        async def run(self, tenant: str, cost: int, work: Any) -> Any:
            seen.append(tenant)
            return await super().run(tenant, cost, work)

    word = "x" * 100
    await masks(Noted(), bad_words=[word] * (INLINE_CHARS // 100))
    assert seen == []
    await masks(Noted(), bad_words=[word] * (INLINE_CHARS // 100 + 1))
    assert seen == ["t"]
