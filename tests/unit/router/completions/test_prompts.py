"""Prompts that a model cannot read, because of their tokens or of their size; what is read elsewhere than on the event
loop."""

import sys
import threading
import time
from collections.abc import Awaitable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.router.completions.fair_threads import FairThreads
from penstock.router.completions.prompts import Reader, tokenize_chat, tokenize_completion
from penstock.text.draft import Draft, PieceEncoder
from penstock.text.seen import SeenTexts
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.openai import (
    MAX_MESSAGES,
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCallIn,
    FunctionDefinition,
    ToolCallIn,
    ToolDefinition,
)
from penstock.wire.tools import RequestedTools, read_tools
from tests.unit.router.http_fakes import IM_START, TOKENIZER, VOCAB_SIZE, byte_tokenizer


def reader(tokenizer: Tokenizer, max_tokens: int | None = None) -> Reader:
    return Reader(tokenizer, max_tokens, FairThreads(), "tenant-1")


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

    assert (await refused(tokenize_completion(ids, reader(short_of_one)))).param == "prompt"
    assert (await refused(tokenize_completion(text, reader(short_of_one)))).param == "prompt"
    assert (await refused(tokenize_chat(chat, reader(short_of_one)))).param == "messages"


async def test_what_the_embedding_has_is_accepted(short_of_one: Tokenizer) -> None:
    request = CompletionRequest(model="m", prompt=[IM_START, 7])

    assert await tokenize_completion(request, reader(short_of_one)) == [[IM_START, 7]]


class Watched:
    """A tokenizer that notes in which threads it works."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self.num_embedded, self.is_embedded = VOCAB_SIZE, True
        self.check_chars = TOKENIZER.check_chars

    def encode(self, *arguments: Any) -> list[int]:
        self.threads.add(threading.current_thread())
        return TOKENIZER.encode(*arguments)

    def draft_chat(self, *arguments: Any, **options: Any) -> Draft:
        return watched_draft(TOKENIZER.draft_chat(*arguments, **options), self.threads)


def watched_draft(draft: Draft, threads: set[threading.Thread]) -> Draft:
    """The draft, which notes in what threads its pieces are encoded."""
    encode, name = draft.encoder

    def noting(text: str, is_first: bool) -> Iterable[list[int]]:
        threads.add(threading.current_thread())
        return encode(text, is_first)

    draft.encoder = PieceEncoder(noting, name)
    return draft


async def tokenize(request: ChatRequest | CompletionRequest, by: Reader) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        return await tokenize_chat(request, by)
    return await tokenize_completion(request, by)


def turns(count: int, content: Any = "") -> ChatRequest:
    return ChatRequest(model="m", messages=[ChatMessageIn(role="user", content=content)] * count)


@pytest.mark.parametrize(
    ("request_", "is_here"),
    [
        (turns(2, "Hi"), True),
        (turns(200), False),
        (turns(1, [ContentPart(type="text", text="")] * 200), False),
        (turns(1, "a" * 10_000), False),
        (CompletionRequest(model="m", prompt="Hi"), True),
        (CompletionRequest(model="m", prompt="a" * 10_000), False),
        (CompletionRequest(model="m", prompt=["a" * 100] * 100), False),
    ],
)
async def test_what_takes_long_is_read_by_a_thread_empty_messages_too(
    request_: ChatRequest | CompletionRequest, is_here: bool
) -> None:
    watched: Any = Watched()

    await tokenize(request_, reader(watched))

    assert (watched.threads == {threading.current_thread()}) is is_here


@pytest.mark.parametrize(
    "request_",
    [
        turns(MAX_MESSAGES),
        turns(1, "a" * 2**23),
        turns(90, "a" * 20),
        CompletionRequest(model="m", prompt="a" * 2**23),
        CompletionRequest(model="m", prompt=["a", "a" * 1001]),
        CompletionRequest(model="m", prompt=[1] * 1001),
        CompletionRequest(model="m", prompt=[[1], [1] * 1001]),
    ],
)
async def test_what_no_context_can_hold_is_refused_at_once(request_: ChatRequest | CompletionRequest) -> None:
    bounded = reader(TOKENIZER, 1000)
    began = time.process_time()

    with pytest.raises(ContextTooLong, match="maximum context length is 1000 tokens") as caught:
        await tokenize(request_, bounded)

    assert time.process_time() - began < 0.5
    assert len(caught.value.message) < 200


async def test_a_long_chat_whose_earlier_turns_were_read_before_needs_no_thread() -> None:
    watched: Any = Watched()
    by = reader(watched)._replace(seen=SeenTexts().scope("tenant-1", b"salt"))
    first = turns(1, "a" * 10_000)
    await tokenize(first, by)
    watched.threads.clear()
    longer = replace(first, messages=[*first.messages, *turns(2, "b").messages])

    token_ids = await tokenize(longer, by)
    assert token_ids == await tokenize(longer, reader(TOKENIZER))
    assert watched.threads == {threading.current_thread()}


async def test_what_fits_exactly_is_read() -> None:
    (prompt,) = await tokenize_completion(CompletionRequest(model="m", prompt="a" * 1000), reader(TOKENIZER, 1000))
    (ids,) = await tokenize_completion(CompletionRequest(model="m", prompt=[7] * 1000), reader(TOKENIZER, 1000))

    assert (len(prompt), len(ids)) == (1000, 1000)
    assert await tokenize_completion(CompletionRequest(model="m", prompt="a" * 5000), reader(TOKENIZER, sys.maxsize))


# --- how a request wants its prompt


def chat(content: str = "ab", **fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[ChatMessageIn(role="user", content=content)], **fields)


@pytest.mark.parametrize("wanted", [{"add_generation_prompt": True, "continue_final_message": True}])
async def test_wishes_that_exclude_each_other_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exclude each other") as caught:
        await tokenize(chat(**wanted), reader(TOKENIZER))

    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [*b"hij"]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [*b"hij"]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [*b"abc"]),
        ({"truncate_prompt_tokens": 100}, [*b"abcdefghij"]),
        ({"truncate_prompt_tokens": -1}, [*b"cdefghij"[1:]]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, [*b"hij"]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, [*b"j"]),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdefghij", [*b"abcdefghij"]])
async def test_a_prompt_is_cut_to_so_many_tokens(fields: dict[str, Any], prompt: Any, expected: list[int]) -> None:
    bound = 100 if fields["truncate_prompt_tokens"] > 0 else 8
    request = CompletionRequest(model="m", prompt=prompt, **fields)

    assert await tokenize(request, reader(TOKENIZER, bound)) == [expected]


async def test_a_conversation_is_cut_too_whatever_its_length() -> None:
    whole = (await tokenize(chat("a" * 400), reader(TOKENIZER, 1000)))[0]
    (cut,) = await tokenize(chat("a" * 400, truncate_prompt_tokens=20), reader(TOKENIZER, 50))
    many = ChatRequest(model="m", messages=chat().messages * 200, truncate_prompt_tokens=10)

    assert cut == whole[-20:]
    assert len((await tokenize(many, reader(TOKENIZER, 50)))[0]) == 10


async def test_of_a_very_long_text_only_as_much_is_read_as_the_cut_can_be_of() -> None:
    request = CompletionRequest(model="m", prompt="a" * 2**23 + "xyz", truncate_prompt_tokens=5)
    began = time.process_time()

    assert await tokenize(request, reader(TOKENIZER, 1000)) == [[*b"aaxyz"[-5:]]]
    assert time.process_time() - began < 0.5


async def test_no_tokens_at_all_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1, or -1"):
        await tokenize(chat(truncate_prompt_tokens=0), reader(TOKENIZER))


async def test_special_tokens_are_left_out_of_texts_where_they_are_not_wanted() -> None:
    tokenizer = byte_tokenizer(prefix_ids=(IM_START,))
    plain, bare = (
        CompletionRequest(model="m", prompt="a"),
        CompletionRequest(model="m", prompt="a", add_special_tokens=False),
    )
    cut = CompletionRequest(model="m", prompt="abc", truncate_prompt_tokens=2)

    assert await tokenize(plain, reader(tokenizer)) == [[IM_START, *b"a"]]
    assert await tokenize(bare, reader(tokenizer)) == [[*b"a"]]
    assert await tokenize(cut, reader(tokenizer)) == [[IM_START, *b"c"]]


# --- tools


def with_tools(description: str, num_calls: int = 0) -> tuple[ChatRequest, RequestedTools]:
    call = ToolCallIn(id="a", function=FunctionCallIn(name="f", arguments='{"x": "' + "y" * 100 + '"}'))
    messages = [
        ChatMessageIn(role="user", content="Hi"),
        ChatMessageIn(role="assistant", tool_calls=[call] * num_calls),
    ]
    function = FunctionDefinition(name="f", description=description)
    request = ChatRequest(model="m", messages=messages, tools=[ToolDefinition(type="function", function=function)])
    tools = read_tools(request)
    assert tools is not None
    return request, tools


async def test_tools_are_part_of_the_prompt_and_of_its_length() -> None:
    request, tools = with_tools("words" * 10)

    (prompt,) = await tokenize_chat(request, reader(TOKENIZER)._replace(tools=tools))

    assert "words" * 10 in TOKENIZER.decode(prompt)
    with pytest.raises(ContextTooLong):
        await tokenize_chat(request, reader(TOKENIZER, len(prompt) - 1)._replace(tools=tools))


@pytest.mark.parametrize(
    ("description", "num_calls", "is_here"), [("", 1, True), ("a" * 5000, 0, False), ("", 60, False)]
)
async def test_long_tools_and_many_calls_are_read_by_a_thread(description: str, num_calls: int, is_here: bool) -> None:
    request, tools = with_tools(description, num_calls)
    threads: set[threading.Thread] = set()

    watched = byte_tokenizer()
    draft_chat = watched.draft_chat
    watched.draft_chat = lambda *given, **named: watched_draft(draft_chat(*given, **named), threads)  # type: ignore[method-assign]
    await tokenize_chat(request, reader(watched)._replace(tools=tools))

    assert (threads == {threading.current_thread()}) is is_here


async def test_tools_go_with_variables_of_the_template_and_with_a_cut() -> None:
    request, tools = with_tools("words")
    tokenizer = byte_tokenizer(template="{{ greeting }}{% for m in messages %}{{ m.content }}{% endfor %}")
    told = reader(tokenizer)._replace(tools=tools)
    (plain,) = await tokenize_chat(request, told)
    (greeted,) = await tokenize_chat(replace(request, chat_template_kwargs={"greeting": "Yo"}), told)
    (cut,) = await tokenize_chat(replace(request, truncate_prompt_tokens=7), told)

    assert "words" in tokenizer.decode(plain)
    assert greeted == [*b"Yo", *plain]
    assert cut == plain[-7:]


async def test_an_answer_can_not_go_on_with_a_message_that_has_calls() -> None:
    request, tools = with_tools("", num_calls=1)

    with pytest.raises(InvalidRequest, match="can't be continued") as caught:
        await tokenize_chat(replace(request, continue_final_message=True), reader(TOKENIZER)._replace(tools=tools))

    assert caught.value.param == "continue_final_message"


async def test_arguments_that_are_no_json_are_refused_with_their_place() -> None:
    call = ToolCallIn(id="a", function=FunctionCallIn(name="f", arguments="{"))
    request = ChatRequest(model="m", messages=[ChatMessageIn(role="assistant", tool_calls=[call])])

    with pytest.raises(InvalidRequest) as caught:
        await tokenize_chat(request, reader(TOKENIZER))

    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
