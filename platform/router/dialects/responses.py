"""A request of OpenAI's Responses API as a chat request, and what its answer repeats of it. Pure.

Invariants: messages, calls and results keep their order, and calls that follow each other are of one message; whatever
a decoded request holds, the outcome is a chat request or InvalidRequest.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

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
from penstock.wire.responses import (
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextForm,
)

ToolWish = Literal["none", "auto", "required"] | NamedToolChoice | None
_TEXT_PARTS = ("input_text", "output_text", "text")


class Repeated(NamedTuple):
    """What an answer repeats of its request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice
    tools: list[ResponseTool]
    top_p: float


def chat_of_responses(request: ResponsesRequest) -> ChatRequest:
    """The chat that answers the request. Raises InvalidRequest for what is not supported."""
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_tokens=request.max_output_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tools=None if request.tools is None else [_tool(tool, index) for index, tool in enumerate(request.tools)],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=None if request.text is None else _response_format(request.text.format),
        chat_template_kwargs=request.chat_template_kwargs,
    )


def repeated(request: ResponsesRequest) -> Repeated:
    """Holds nothing of the body but copies."""
    form = TextForm(type="text") if request.text is None or request.text.format is None else request.text.format
    form = form if form.schema is None else msgspec.structs.replace(form, schema=form.schema.copy())
    return Repeated(
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=TextConfig(format=form),
        tool_choice=request.tool_choice or "auto",
        tools=[_copy(tool) for tool in request.tools or ()],
        top_p=1.0 if request.top_p is None else request.top_p,
    )


def _copy(tool: ResponseTool) -> ResponseTool:
    return tool if tool.parameters is None else msgspec.structs.replace(tool, parameters=tool.parameters.copy())


def _messages(request: ResponsesRequest) -> list[ChatMessageIn]:
    messages: list[ChatMessageIn] = []
    if request.instructions:
        messages.append(ChatMessageIn(role="system", content=request.instructions))
    if isinstance(request.input, str):
        messages.append(ChatMessageIn(role="user", content=request.input))
        return messages
    for index, item in enumerate(request.input):
        path = f"input[{index}]"
        if item.type == "function_call":
            _add_call(messages, item, path)
        elif item.type == "function_call_output":
            messages.append(_result(item, path))
        elif item.type in (None, "message"):
            messages.append(_message(item, path))
        elif item.type == "item_reference":
            raise InvalidRequest(
                f"{path} refers to an item of an earlier answer, and nothing is kept here; send the item itself.",
                param=f"{path}.type",
            )
        elif item.type != "reasoning":
            raise InvalidRequest(
                f"Items of type '{item.type[:40]}' are not supported; 'message', 'function_call',"
                " 'function_call_output' and 'reasoning' are.",
                param=f"{path}.type",
            )
    if not messages:
        raise InvalidRequest("'input' has nothing to answer.", param="input")
    return messages


def _message(item: InputItem, path: str) -> ChatMessageIn:
    if item.role is None:
        raise InvalidRequest("An item of type 'message' needs a 'role'.", param=f"{path}.role")
    if item.content is None:
        raise InvalidRequest("An item of type 'message' needs a 'content'.", param=f"{path}.content")
    return ChatMessageIn(role=item.role, content=_content(item.content, f"{path}.content"))


def _add_call(messages: list[ChatMessageIn], item: InputItem, path: str) -> None:
    """Add a call to the assistant's message before it, or in a message of its own."""
    for name in ("call_id", "name"):
        if getattr(item, name) is None:
            raise InvalidRequest(f"An item of type 'function_call' needs its '{name}'.", param=f"{path}.{name}")
    assert item.call_id is not None
    assert item.name is not None
    call = ToolCallIn(id=item.call_id, function=FunctionCallIn(name=item.name, arguments=item.arguments or "{}"))
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessageIn(role="assistant", tool_calls=[call]))
        return
    calls = messages[-1].tool_calls
    if calls is None:
        messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=[call])
    elif len(calls) < MAX_TOOLS:
        calls.append(call)
    else:
        raise InvalidRequest(f"More than {MAX_TOOLS} calls follow each other in 'input'.", param=path)


def _result(item: InputItem, path: str) -> ChatMessageIn:
    if not item.call_id:
        raise InvalidRequest("An item of type 'function_call_output' needs its 'call_id'.", param=f"{path}.call_id")
    content = _content(item.output or "", f"{path}.output")
    return ChatMessageIn(role="tool", tool_call_id=item.call_id, content=content)


def _content(content: str | Sequence[InputPart], place: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)] or ""


def _part(part: InputPart, path: str) -> ContentPart:
    if part.type not in _TEXT_PARTS:
        raise InvalidRequest(
            f"Parts of type '{part.type[:40]}' are not supported in {path}; this model reads text only.",
            param=f"{path}.type",
        )
    if part.text is None:
        raise InvalidRequest(f"A part of type '{part.type}' needs a 'text'.", param=f"{path}.text")
    return ContentPart(type="text", text=part.text)


def _tool(tool: ResponseTool, index: int) -> ToolDefinition:
    if tool.type != "function":
        raise InvalidRequest(
            f"Tools of type '{tool.type[:40]}' run on a provider's servers and are not supported; 'function' is.",
            param=f"tools[{index}].type",
        )
    if tool.name is None:
        raise InvalidRequest("A tool of type 'function' needs a 'name'.", param=f"tools[{index}].name")
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _choice(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> ToolWish:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type != "function":
        raise InvalidRequest(
            f"A 'tool_choice' of type '{choice.type[:40]}' is not supported; 'function' is, with the function's name.",
            param="tool_choice.type",
        )
    if choice.name is None:
        raise InvalidRequest("A 'tool_choice' of type 'function' needs a 'name'.", param="tool_choice.name")
    return NamedToolChoice(type="function", function=FunctionName(name=choice.name))


def _response_format(form: TextForm | None) -> ResponseFormat | None:
    if form is None or form.type != "json_schema":
        return None if form is None else ResponseFormat(type=form.type)
    if form.schema is None or form.name is None:
        raise InvalidRequest("A format of type 'json_schema' needs a 'name' and a 'schema'.", param="text.format")
    described = JsonSchemaFormat(name=form.name, description=form.description, schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=described)
