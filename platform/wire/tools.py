"""The tools of a chat request: checked, and their parameters read once.

Not the form in which a model is told of them and calls them (`penstock.text.tools`). Invariant: whatever a request's
tools hold, the outcome is a `RequestedTools` of bounded size and depth, or InvalidRequest. Source: OpenAI's API
reference, chat completions, `tools`, `tool_choice` and `parallel_tool_calls`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import ChatMessageIn, ChatRequest, FunctionDefinition, NamedToolChoice, ToolCallIn

MAX_PARAMETERS_BYTES = 2**18
"""JSON of the parameters of all tools together."""
MAX_DEPTH = 64
"""Arrays and objects inside of each other, in a tool's parameters and in the arguments of a past call."""
NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}
"""Schema of a function that declares no parameters."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


class ToolChoice(NamedTuple):
    """What the request says of calling."""

    must_call: bool = False
    """Whether the answer must be a call; else the model decides."""
    name: str | None = None
    """Function that must be called; None: any of them."""


class Function(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, object]
    """JSON Schema of the arguments, an object."""


class RequestedTools(NamedTuple):
    """The functions that an answer may call."""

    functions: tuple[Function, ...]
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True
    """Whether one answer may have several calls."""
    num_chars: int = 0
    """Characters of names, descriptions and parameters, as the request has them."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)


def read_tools(request: ChatRequest) -> RequestedTools | None:
    """The tools that an answer to this request may call. Returns None if there are none, or if none may be called.

    Raises InvalidRequest for tools of another type than `function`, two of one name, parameters that are no JSON object
    or exceed the bounds, and a choice that names no tool.
    """
    functions = tuple(_read_functions(request))
    choice = _read_choice(request, functions)
    if not functions or request.tool_choice == "none":
        return None
    num_chars = sum(
        len(spec.name) + len(spec.description or "") + len(spec.parameters or b"")
        for tool in request.tools or ()
        if (spec := tool.function) is not None
    )
    return RequestedTools(functions, choice, request.parallel_tool_calls is not False, num_chars)


def check_tool_message(message: ChatMessageIn, path: str) -> None:
    """Raises InvalidRequest where the fields of calls and results do not fit the message's role. path: of the message,
    such as `messages[0]`."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"Only messages of role 'assistant' have 'tool_calls', not of role '{message.role}'.",
            param=f"{path}.tool_calls",
        )
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest("A message of role 'tool' needs a 'tool_call_id'.", param=f"{path}.tool_call_id")
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequest(
            f"Only messages of role 'tool' have a 'tool_call_id', not of role '{message.role}'.",
            param=f"{path}.tool_call_id",
        )
    for index, call in enumerate(message.tool_calls or ()):
        if call.type != "function" or call.function is None:
            raise InvalidRequest(
                f"Tool calls of type '{call.type[:40]}' are not supported; 'function' is.",
                param=f"{path}.tool_calls[{index}].type",
            )


def read_arguments(call: ToolCallIn, param: str) -> dict[str, object]:
    """The arguments of a past call, for chat templates want them as an object. Raises InvalidRequest for what is not a
    JSON object, or nested more than MAX_DEPTH deep."""
    assert call.function is not None  # `check_tool_message` has seen to it
    text = call.function.arguments
    return _read_object(text, param) if text.strip() else {}


def _read_functions(request: ChatRequest) -> Iterable[Function]:
    names: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(request.tools or ()):
        param = f"tools[{index}]"
        if tool.type != "function":
            raise InvalidRequest(
                f"Tools of type '{tool.type[:40]}' are not supported; 'function' is.", param=f"{param}.type"
            )
        if tool.function is None:
            raise InvalidRequest("A tool of type 'function' needs a 'function'.", param=f"{param}.function")
        name = tool.function.name
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                "The name of a function consists of letters, digits, underscores, dots and dashes.",
                param=f"{param}.function.name",
            )
        if name in names:
            raise InvalidRequest(f"Two tools are named '{name}'.", param=f"{param}.function.name")
        names.add(name)
        num_bytes += len(tool.function.parameters or b"")
        if num_bytes > MAX_PARAMETERS_BYTES:
            raise InvalidRequest(
                f"The parameters of all tools have more than {MAX_PARAMETERS_BYTES} bytes together.", param="tools"
            )
        yield _read_function(tool.function, f"{param}.function.parameters")


def _read_function(function: FunctionDefinition, param: str) -> Function:
    raw = function.parameters
    parameters = NO_PARAMETERS if raw is None or bytes(raw) == b"null" else _read_object(raw, param)
    return Function(function.name, function.description, parameters)


def _read_choice(request: ChatRequest, functions: Sequence[Function]) -> ToolChoice:
    choice = request.tool_choice
    if choice is None or choice == "none" or choice == "auto":
        return ToolChoice()
    if not functions:
        raise InvalidRequest("A 'tool_choice' that demands a call needs 'tools'.", param="tool_choice")
    if not isinstance(choice, NamedToolChoice):
        return ToolChoice(must_call=True)
    if choice.type != "function" or choice.function is None:
        raise InvalidRequest(
            f"A 'tool_choice' of type '{choice.type[:40]}' is not supported; 'function' is, with the function's name.",
            param="tool_choice.type",
        )
    if all(function.name != choice.function.name for function in functions):
        raise InvalidRequest(
            f"'tool_choice' names the function '{choice.function.name[:64]}', which is not among the tools.",
            param="tool_choice.function.name",
        )
    return ToolChoice(must_call=True, name=choice.function.name)


def _read_object(raw: str | msgspec.Raw, param: str) -> dict[str, object]:
    try:
        found: object = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(param) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"'{param}' must hold a JSON object.", param=param)
    if _is_deeper(found, MAX_DEPTH):
        raise _too_deep(param)
    return found


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' is nested more than {MAX_DEPTH} deep.", param=param)


def _is_deeper(value: object, limit: int) -> bool:
    """Whether arrays and objects lie more than `limit` deep inside of each other."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
