"""A request of Anthropic's Messages API as a chat request. Pure.

Invariants: a message's texts, calls and results keep their order; whatever a decoded request holds, the outcome is a
chat request or InvalidRequest.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from penstock.wire.anthropic import (
    BlockIn,
    CountTokensRequest,
    MessageIn,
    MessagesRequest,
    TextPart,
    ToolChoiceIn,
    ToolIn,
)
from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import (
    MAX_TOOLS,
    ChatMessageIn,
    ChatRequest,
    ContentPart,
    FunctionCallIn,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    ToolCallIn,
    ToolDefinition,
)

ERROR_MARK = "Error: "
"""What stands before the result of a call that has failed."""
_THOUGHTS = ("thinking", "redacted_thinking")
ToolWish = Literal["none", "auto", "required"] | NamedToolChoice | None
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(request: MessagesRequest) -> ChatRequest:
    """The chat that answers the request. Raises InvalidRequest for what is not supported."""
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences or None,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tools=_tools(request.tools),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=_is_parallel(request.tool_choice),
        response_format=_response_format(request),
        continue_final_message=_is_continued(request),
        chat_template_kwargs=request.chat_template_kwargs,
    )


def chat_to_count(request: CountTokensRequest) -> ChatRequest:
    """A chat with the same prompt. Raises InvalidRequest for what is not supported."""
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        tools=_tools(request.tools),
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=_is_parallel(request.tool_choice),
        continue_final_message=_is_continued(request),
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _messages(request: CountTokensRequest) -> list[ChatMessageIn]:
    messages: list[ChatMessageIn] = []
    if request.system:
        messages.append(ChatMessageIn(role="system", content=_content(request.system, "system")))
    for index, message in enumerate(request.messages):
        place = f"messages[{index}].content"
        if isinstance(message.content, str):
            messages.append(ChatMessageIn(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message.content, place))
        else:
            messages += _user(message, message.content, place)
    return messages


def _is_continued(request: CountTokensRequest) -> bool | None:
    """Whether the answer goes on with the last message, as Anthropic has it for one of the assistant."""
    last = request.messages[-1]
    if last.role != "assistant":
        return None
    if not isinstance(last.content, str) and any(block.type == "tool_use" for block in last.content):
        raise InvalidRequest(
            "The last message calls tools; a message with their results, 'tool_result', must follow.", param="messages"
        )
    return True


def _assistant(blocks: Sequence[BlockIn], place: str) -> ChatMessageIn:
    texts: list[ContentPart] = []
    calls: list[ToolCallIn] = []
    for index, block in enumerate(blocks):
        path = f"{place}[{index}]"
        if block.type == "text":
            texts.append(_text(block, path))
        elif block.type == "tool_use":
            calls.append(_call(block, path))
        elif block.type not in _THOUGHTS:
            raise _not_supported(block.type, path, "'text', 'tool_use' and 'thinking' are")
    if len(calls) > MAX_TOOLS:
        raise InvalidRequest(f"A message has at most {MAX_TOOLS} blocks of type 'tool_use'.", param=place)
    content = texts if texts or calls else ""
    return ChatMessageIn(role="assistant", content=content or None if calls else content, tool_calls=calls or None)


def _user(message: MessageIn, blocks: Sequence[BlockIn], place: str) -> Iterator[ChatMessageIn]:
    """The results of calls as messages of their own, and what stands between them."""
    texts: list[ContentPart] = []
    for index, block in enumerate(blocks):
        path = f"{place}[{index}]"
        if block.type == "text":
            texts.append(_text(block, path))
        elif block.type == "tool_result" and message.role == "user":
            if texts:
                yield ChatMessageIn(role="user", content=texts)
                texts = []
            yield _result(block, path)
        else:
            raise _not_supported(block.type, path, "'text' and 'tool_result' are; this model reads text only")
    if texts or not blocks:
        yield ChatMessageIn(role=message.role, content=texts or "")


def _call(block: BlockIn, path: str) -> ToolCallIn:
    for name in ("id", "name"):
        if getattr(block, name) is None:
            raise InvalidRequest(f"A block of type 'tool_use' needs its '{name}'.", param=f"{path}.{name}")
    assert block.id is not None
    assert block.name is not None
    try:
        arguments = "{}" if block.input is None else bytes(block.input).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    return ToolCallIn(id=block.id, function=FunctionCallIn(name=block.name, arguments=arguments))


def _result(block: BlockIn, path: str) -> ChatMessageIn:
    if not block.tool_use_id:
        raise InvalidRequest("A block of type 'tool_result' needs its 'tool_use_id'.", param=f"{path}.tool_use_id")
    content = _content(block.content or "", f"{path}.content")
    if block.is_error:
        content = ERROR_MARK + content if isinstance(content, str) else [_part(ERROR_MARK), *content]
    return ChatMessageIn(role="tool", tool_call_id=block.tool_use_id, content=content)


def _content(content: str | Iterable[TextPart], place: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = [_text(part, f"{place}[{index}]") for index, part in enumerate(content)]
    return parts or ""


def _text(block: BlockIn | TextPart, path: str) -> ContentPart:
    if block.type != "text":
        raise _not_supported(block.type, path, "'text' is; this model reads text only")
    if block.text is None:
        raise InvalidRequest("A block of type 'text' needs a 'text'.", param=f"{path}.text")
    return _part(block.text)


def _part(text: str) -> ContentPart:
    return ContentPart(type="text", text=text)


def _not_supported(kind: str, path: str, supported: str) -> InvalidRequest:
    return InvalidRequest(
        f"Blocks of type '{kind[:40]}' are not supported in {path}; {supported}.", param=f"{path}.type"
    )


def _tools(tools: Sequence[ToolIn] | None) -> list[ToolDefinition] | None:
    return None if tools is None else [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: ToolIn, path: str) -> ToolDefinition:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"Tools of type '{tool.type[:40]}' run on Anthropic's servers and are not supported; 'custom' is.",
            param=f"{path}.type",
        )
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _choice(choice: ToolChoiceIn | None) -> ToolWish:
    if choice is None or choice.type != "tool":
        return None if choice is None else _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("A 'tool_choice' of type 'tool' needs the tool's 'name'.", param="tool_choice.name")
    return NamedToolChoice(type="function", function=FunctionName(name=choice.name))


def _is_parallel(choice: ToolChoiceIn | None) -> bool | None:
    return None if choice is None or choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use


def _response_format(request: MessagesRequest) -> ResponseFormat | None:
    wanted = None if request.output_config is None else request.output_config.format
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="answer", schema=wanted.schema))
