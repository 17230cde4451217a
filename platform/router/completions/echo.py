"""What an answer shows of its prompt: the text (`echo`), and log probabilities of its tokens. Pure.

The choices of a prompt share it. A text is shown as the caller wrote it, token ids as they spell; where the two differ,
as by a token that was put in front, places in the text are those of the text that is shown. Long prompts are worked on
in parts, and what the replica sent stays packed until it is shown.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from penstock.router.completions.logprobs import finite
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.wire.frames import PromptLogprobs, TokenLogprobs, unpack_floats, unpack_token_ids
from penstock.wire.openai import ChatRequest, CompletionRequest, PromptToken

PART_TOKENS = 16
"""Tokens that are shown at once; see `formats`."""


class EchoWish(NamedTuple):
    """What a request wants to see of its prompts."""

    has_text: bool
    num_legacy: int | None
    """Likeliest tokens in the legacy log probabilities, behind which the answer's own come; None: these are not
    wanted."""
    num_top: int | None
    """Likeliest tokens in `prompt_logprobs`; None: not wanted."""
    skips_special: bool
    """Special tokens are left out of the text of token ids."""

    def num_entries(self, num_tokens: int) -> int:
        """Entries of an answer's size that prompts of so many tokens add; see `plan`."""
        asked = (self.num_legacy, self.num_top)
        return num_tokens * (self.has_text + sum(2 + count for count in asked if count is not None))


def wish_of(request: ChatRequest | CompletionRequest) -> EchoWish | None:
    """None where the answer shows nothing of the prompt."""
    has_text = bool(request.echo)
    legacy = request.logprobs if has_text and isinstance(request, CompletionRequest) else None
    if not has_text and request.prompt_logprobs is None:
        return None
    return EchoWish(has_text, legacy, request.prompt_logprobs, request.skip_special_tokens is not False)


def text_of(request: ChatRequest | CompletionRequest, prompt: int) -> str | None:
    """What an echo shows of prompt number `prompt` as the caller wrote it; of a chat the last message, where the answer
    goes on with it. None: what the prompt's tokens spell."""
    if isinstance(request, ChatRequest):
        last = request.messages[-1]
        if last.role != "assistant" and not request.continue_final_message:
            return ""
        content = last.content
        return "".join([part.text or "" for part in content]) if isinstance(content, list) else content or ""
    text = request.prompt if isinstance(request.prompt, str) else request.prompt[prompt]
    return text if isinstance(text, str) and request.truncate_prompt_tokens is None else None


class PromptPiece(NamedTuple):
    """A part of the prompt as a part of the answer."""

    text: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    """One for each of `token_ids`, in the legacy format; the first token has none."""
    offsets: list[int] = []
    """Place in the text where each of `token_ids` begins."""


class Echo:
    """What an answer shows of one prompt. `logprobs` is set when the prompt is computed, before anything is shown."""

    def __init__(self, wish: EchoWish, tokenizer: Tokenizer, packed_token_ids: bytes, text: str | None) -> None:
        """text: as of `text_of`."""
        self.wish = wish
        self.logprobs: PromptLogprobs | None = None
        self._tokenizer = tokenizer
        self._packed_token_ids = packed_token_ids
        self._skips_special = text is None and wish.skips_special
        self._text = text

    @property
    def text(self) -> str:
        if not self.wish.has_text:
            return ""
        if self._text is None:
            self._text = self._spell()
        return self._text

    @property
    def has_legacy(self) -> bool:
        """Whether the prompt stands in the legacy log probabilities."""
        return self.wish.num_legacy is not None and self._has_logprobs

    @property
    def _has_logprobs(self) -> bool:
        """Whether there are any; a prompt of one token needs none."""
        return self.logprobs is not None or len(self._packed_token_ids) == 4

    def pieces(self) -> Iterator[PromptPiece]:
        """The prompt as pieces of text that go before the answer's: all of it, or with log probabilities part by
        part."""
        if not self.has_legacy:
            if self.text:
                yield PromptPiece(self.text)
            return
        text, shown = self.text, 0
        parts = self._parts()
        for (token_ids, offsets), logprobs in zip(parts, self._legacy(), strict=True):
            end = offsets[-1]
            yield PromptPiece(text[shown:end], token_ids, logprobs, offsets[:-1])
            shown = end

    def prompt_tokens(self) -> Iterator[list[dict[str, PromptToken] | None]]:
        """The entries of `prompt_logprobs`, part by part; none at all where there are no log probabilities."""
        if self.wish.num_top is None or not self._has_logprobs:
            return
        for token_ids, ranks, logprobs in zip(self._ids(), self._ranks(), self._unpack(self.wish.num_top), strict=True):
            yield [
                None if item is None or rank is None else self._describe(token_id, rank, item)
                for token_id, rank, item in zip(token_ids, ranks, logprobs, strict=True)
            ]

    def _describe(self, token_id: int, rank: int, item: TokenLogprobs) -> dict[str, PromptToken]:
        found = {
            str(top_id): self._token(top_id, logprob, place) for place, (top_id, logprob) in enumerate(item.top, 1)
        }
        return {str(token_id): self._token(token_id, item.logprob, rank)} | found

    def _token(self, token_id: int, logprob: float, rank: int) -> PromptToken:
        return PromptToken(finite(logprob), rank, self._tokenizer.token_bytes[token_id].decode("utf-8", "replace"))

    def _spell(self) -> str:
        detokenizer = Detokenizer(self._tokenizer, self._skips_special)
        return detokenizer.push(unpack_token_ids(self._packed_token_ids)) + detokenizer.finish()

    def _parts(self) -> Iterator[tuple[list[int], list[int]]]:
        """Token ids, and the place in the text where each begins and the last one ends; the last part ends with the
        text."""
        text, spelled = self.text, self._spell()
        num_hidden = len(spelled) - len(text) if spelled.endswith(text) else 0
        detokenizer = Detokenizer(self._tokenizer, self._skips_special)
        parts, num_chars = list(self._ids()), 0
        for number, token_ids in enumerate(parts, 1):
            offsets = []
            for token_id in token_ids:
                offsets.append(min(max(0, num_chars - num_hidden), len(text)))
                num_chars += len(detokenizer.push((token_id,)))
            is_last = number == len(parts)
            yield token_ids, [*offsets, len(text) if is_last else min(max(0, num_chars - num_hidden), len(text))]

    def _legacy(self) -> Iterator[list[TokenLogprobs | None]]:
        return self._unpack(self.wish.num_legacy or 0)

    def _ids(self) -> Iterator[list[int]]:
        size = 4 * PART_TOKENS
        for first in range(0, len(self._packed_token_ids), size):
            yield unpack_token_ids(self._packed_token_ids[first : first + size])

    def _ranks(self) -> Iterator[list[int | None]]:
        """Part by part; the first token has none."""
        ranks = self.logprobs.ranks if self.logprobs is not None else b""
        packed = b"\0\0\0\0" + ranks
        size = 4 * PART_TOKENS
        for first in range(0, len(packed), size):
            yield [rank or None for rank in unpack_token_ids(packed[first : first + size])]

    def _unpack(self, num_top: int) -> Iterator[list[TokenLogprobs | None]]:
        """Log probabilities with so many likeliest tokens, part by part; the first token has none."""
        held = self.logprobs or PromptLogprobs(0)
        entries = chain((None,), _entries(held, min(num_top, held.num_top)))
        for token_ids in self._ids():
            yield [next(entries) for _ in token_ids]


def _entries(held: PromptLogprobs, num_top: int) -> Iterator[TokenLogprobs]:
    for first in range(0, held.num_tokens, PART_TOKENS):
        end = min(first + PART_TOKENS, held.num_tokens)
        logprobs = unpack_floats(held.logprobs[4 * first : 4 * end])
        width = 4 * held.num_top
        top_ids = unpack_token_ids(held.top_ids[width * first : width * end])
        values = unpack_floats(held.top_logprobs[width * first : width * end])
        for number, logprob in enumerate(logprobs):
            place = number * held.num_top
            top = zip(top_ids[place : place + num_top], values[place : place + num_top], strict=True)
            yield TokenLogprobs(logprob, tuple(top))
