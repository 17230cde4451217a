"""The prompts of a request as token ids: messages through the model's chat template, texts, or ids as they are; and
what of them fits into a model's context.

Invariant: work that takes longer than a millisecond or so is not done on the event loop, and work that can't end in a
prompt for the model is not begun, or given up.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.parameters import asked_max_tokens, bound_max_tokens, check_token_ids
from penstock.router.routing.request import TokenizedPrompt
from penstock.text.draft import Cut, Draft
from penstock.text.seen import SeenScope
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.forms import OWN_FORM, ToolForm
from penstock.text.tools.prompt import build_conversation, content_text, has_tools
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import SamplingParams, pack_token_ids
from penstock.wire.openai import MAX_CHOICES, ChatMessageIn, ChatRequest, CompletionRequest
from penstock.wire.tools import RequestedTools

INLINE_COST = 4096
"""Most work that is done on the event loop; more goes to a thread, for its milliseconds would hold up every stream of
this gateway. A character of text is 1."""
LAID_OUT_CHARS = 8
"""Characters that cost 1 where they are only laid out by a chat template, and found among those that were read before:
a fifth of what they may."""
MESSAGE_COST = 64
"""What a message or content part costs in a chat template, its text apart."""


class Reader(NamedTuple):
    """How the prompts of a request are read: by which model's tokenizer, for whom, up to how many tokens."""

    tokenizer: Tokenizer
    max_tokens: int | None
    """Context of the model; None: no bound, for whoever answers may have a longer one than anybody here knows."""
    threads: FairThreads
    tenant: str
    tools: RequestedTools | None = None
    """Tools that the answer may call."""
    seen: SeenScope | None = None
    """Texts that were read before; None: none are looked up, and none remembered."""

    async def run(self, cost: int, work: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Do the work here, or in a thread when it costs much."""
        return work() if cost <= INLINE_COST else await self.threads.run(self.tenant, cost, work)


class Turn(NamedTuple):
    """How a conversation becomes a prompt, beside its messages."""

    variables: Mapping[str, object] | None = None
    """Variables of the chat template."""
    is_continued: bool = False
    """The prompt ends within the last message."""


_PLAIN_TURN = Turn()


def turn_of(request: ChatRequest) -> Turn:
    """Raises InvalidRequest for wishes that exclude each other."""
    begins, continues = request.add_generation_prompt, request.continue_final_message
    if begins is None and not continues and request.chat_template_kwargs is None:
        return _PLAIN_TURN
    if begins and continues:
        raise InvalidRequest(
            "'add_generation_prompt' and 'continue_final_message' exclude each other; set one.",
            param="continue_final_message",
        )
    if continues and request.messages[-1].tool_calls:
        raise InvalidRequest(
            "A message with 'tool_calls' can't be continued; leave out 'continue_final_message'.",
            param="continue_final_message",
        )
    variables = dict(request.chat_template_kwargs or {})
    if continues or begins is False:
        variables["add_generation_prompt"] = False
    return Turn(variables, bool(continues))


async def tokenize_chat(request: ChatRequest, reader: Reader) -> list[list[int]]:
    """The one prompt of a chat. Raises InvalidRequest when the template refuses, ContextTooLong for more than the
    reader's bound."""
    messages, cut = request.messages, _cut(request, reader)
    if cut is None and reader.max_tokens is not None and len(messages) > reader.max_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {reader.max_tokens} tokens. However, there are {len(messages)}"
            " messages. Shorten the conversation."
        )
    num_chars, num_parts = _measure(messages)
    if cut is None:
        reader.tokenizer.check_chars(num_chars, reader.max_tokens)
    cost_of_parts = MESSAGE_COST * num_parts + _cost_of_tools(messages, reader.tools)
    draft = partial(_draft_chat, messages, reader, turn_of(request), cut)
    if cost_of_parts + num_chars // LAID_OUT_CHARS > INLINE_COST:
        return await reader.run(cost_of_parts + num_chars, lambda: _finish(draft(), reader))
    drafted = draft()  # how much of it is new decides where it is encoded
    return await reader.run(cost_of_parts + drafted.num_new_chars, partial(_finish, drafted, reader))


async def tokenize_completion(request: CompletionRequest, reader: Reader) -> list[list[int]]:
    """The prompts of a legacy completion, one or several. Raises InvalidRequest for an empty prompt, a mixed array, or
    token ids that the model has not, ContextTooLong for more than the reader's bound."""
    texts, token_ids = _split_prompt(request.prompt)
    if len(token_ids if token_ids is not None else texts) > MAX_CHOICES:
        raise InvalidRequest(
            f"'prompt' holds {len(request.prompt)} prompts; at most {MAX_CHOICES} are accepted.", param="prompt"
        )
    cut = _cut(request, reader)
    if token_ids is not None:
        return _check_prompts(reader, token_ids if cut is None else list(map(cut.tokens, token_ids)), "prompt")
    for text in texts if cut is None else ():
        reader.tokenizer.check_chars(len(text), reader.max_tokens)
    add_special = request.add_special_tokens is not False
    return await reader.run(sum(map(len, texts)), partial(_encode_texts, texts, reader, add_special, cut))


def _draft_chat(messages: Sequence[ChatMessageIn], reader: Reader, turn: Turn, cut: Cut | None) -> Draft:
    variables = turn.variables
    told: Sequence[Mapping[str, object]]
    if has_tools(messages, reader.tools):
        told, shown = build_conversation(messages, reader.tools, _tool_form(reader))
        variables = {**shown, **(variables or {})}
    else:
        told = [
            {"role": "system" if message.role == "developer" else message.role, "content": content_text(message)}
            for message in messages
        ]
    return reader.tokenizer.draft_chat(
        told, variables, reader.max_tokens, is_continued=turn.is_continued, cut=cut, seen=reader.seen
    )


def _finish(draft: Draft, reader: Reader) -> list[list[int]]:
    return _check_prompts(reader, [draft.token_ids()], "messages", is_text=True)


def _tool_form(reader: Reader) -> ToolForm:
    """The form of past calls, too: where a template is for conversations with tools alone, the other one shows none."""
    has_template = reader.tools is not None or not reader.tokenizer.has_tool_template
    return reader.tokenizer.tool_form if has_template else OWN_FORM


def _encode_texts(texts: Sequence[str], reader: Reader, add_special: bool, cut: Cut | None) -> list[list[int]]:
    prompts = [reader.tokenizer.encode(text, add_special, reader.max_tokens, cut) for text in texts]
    return _check_prompts(reader, prompts, "prompt", is_text=True)


def _measure(messages: Sequence[ChatMessageIn]) -> tuple[int, int]:
    """Characters of a chat, and its messages and content parts."""
    num_chars, num_parts = 0, len(messages)
    for message in messages:
        if isinstance(message.content, list):
            num_chars += sum(len(part.text or "") for part in message.content)
            num_parts += len(message.content)
        else:
            num_chars += len(message.content or "")
    return num_chars, num_parts


def _cost_of_tools(messages: Sequence[ChatMessageIn], tools: RequestedTools | None) -> int:
    """Cost of tools and past calls in a chat template; their JSON may be written shorter there."""
    cost = 0 if tools is None else tools.num_chars + MESSAGE_COST * len(tools.functions)
    for message in messages:
        if message.tool_calls:
            texts = [call.function.arguments for call in message.tool_calls if call.function is not None]
            cost += sum(map(len, texts)) + MESSAGE_COST * len(texts)
    return cost


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
    kinds = set(map(type, prompt))
    if kinds <= {str}:
        return cast("list[str]", prompt), None
    if kinds == {int}:
        return [], [cast("list[int]", prompt)]
    if kinds == {list}:
        return [], cast("list[list[int]]", prompt)
    raise InvalidRequest("'prompt' mixes strings, token ids and arrays of token ids; use one kind.", param="prompt")


def _check_prompts(reader: Reader, prompts: list[list[int]], param: str, *, is_text: bool = False) -> list[list[int]]:
    """The prompts as they are. is_text: the ids are the tokenizer's own. Raises InvalidRequest for an empty one, and
    for token ids that the model has not: text may hold tokens that were added to the tokenizer only."""
    if not prompts or not all(prompts):
        raise InvalidRequest(f"'{param}' is empty: there is no token to begin with.", param=param)
    longest = max(map(len, prompts))
    if reader.max_tokens is not None and longest > reader.max_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {reader.max_tokens} tokens. However, a prompt has {longest}."
            " Shorten it."
        )
    if not is_text or not reader.tokenizer.is_embedded:
        for prompt in prompts:
            check_token_ids(prompt, reader.tokenizer.num_embedded, param)
    return prompts


def _cut(request: ChatRequest | CompletionRequest, reader: Reader) -> Cut | None:
    """What the request wants its prompts cut to; None: nothing. Raises InvalidRequest for no tokens at all."""
    wanted, bound = request.truncate_prompt_tokens, reader.max_tokens
    if wanted is None:
        return None
    if not wanted:
        raise InvalidRequest(
            "'truncate_prompt_tokens' is at least 1, or -1 for what the context leaves, not 0.",
            param="truncate_prompt_tokens",
        )
    if bound is not None:
        wanted = min(wanted, bound) if wanted > 0 else max(1, bound - (asked_max_tokens(request) or 1))
    return Cut(wanted, request.truncation_side != "right") if wanted > 0 else None
