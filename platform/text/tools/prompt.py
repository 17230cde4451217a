"""A conversation with tools as a chat template takes it: tools in OpenAI's form, and past calls and results.

Where the template shows no tools, the system message does, in a text of ours: the functions as JSON lines between
<tools> and </tools>, and the demand to write each call as JSON between <tool_call> and </tool_call>. Past calls are
then written so into the assistant's messages, and results between <tool_response> and </tool_response> into messages of
the user, for every template has those. Sources: transformers' apply_chat_template (arguments of calls are objects); the
tags are those of Hermes 3 and Qwen2.5, which many models have been trained on.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.text.tools.forms import ToolForm
from penstock.text.tools.parser import HERMES_CLOSE, HERMES_OPEN
from penstock.wire.openai import ChatMessageIn
from penstock.wire.tools import Function, RequestedTools, read_arguments

Message = dict[str, object]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
SHORT_ID_CHARS = 9


class Conversation(NamedTuple):
    """What a chat template is given."""

    messages: list[Message]
    options: dict[str, object]
    """Further variables of the template: `tools`, where it shows them."""


def has_tools(messages: Sequence[ChatMessageIn], tools: RequestedTools | None) -> bool:
    """Whether a conversation has tools, calls or results; without any it needs nothing of this module."""
    return tools is not None or any(message.role == "tool" or message.tool_calls for message in messages)


def build_conversation(messages: Sequence[ChatMessageIn], tools: RequestedTools | None, form: ToolForm) -> Conversation:
    """The conversation for a template of that form. Raises InvalidRequest where the arguments of a past call are no
    JSON object."""
    plain = list(_read_messages(messages))
    if not form.is_in_template:
        return Conversation(_write_out(plain, tools), {})
    if form.has_short_ids:
        plain = [_with_short_ids(message) for message in plain]
    if form.has_single_calls:
        plain = list(_one_call_each(plain))
    return Conversation(plain, {"tools": [_definition(function) for function in tools.functions]} if tools else {})


def short_id(call_id: str) -> str:
    """The id as nine letters and digits: itself, if it is that already."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:SHORT_ID_CHARS]


# --- messages as transformers has them


def _read_messages(messages: Sequence[ChatMessageIn]) -> Iterator[Message]:
    names: dict[str, str] = {}  # of functions, by the id of a call
    for index, message in enumerate(messages):
        read: Message = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content_text(message),
        }
        calls = []
        for number, call in enumerate(message.tool_calls or ()):
            assert call.function is not None  # checked
            names[call.id] = call.function.name
            arguments = read_arguments(call, f"messages[{index}].tool_calls[{number}].function.arguments")
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            )
        if calls:
            read["tool_calls"] = calls
        if message.tool_call_id is not None:
            read["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                read["name"] = names[message.tool_call_id]
        yield read


def content_text(message: ChatMessageIn) -> str:
    """The text of a message, its parts joined."""
    if isinstance(message.content, list):
        return "".join([part.text or "" for part in message.content])
    return message.content or ""


def _definition(function: Function) -> Message:
    described = {} if function.description is None else {"description": function.description}
    return {
        "type": "function",
        "function": {"name": function.name, **described, "parameters": dict(function.parameters)},
    }


def _calls(message: Message) -> list[dict[str, object]]:
    found = message.get("tool_calls")
    return found if isinstance(found, list) else []


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if calls := _calls(message):
        changed["tool_calls"] = [{**call, "id": short_id(str(call["id"]))} for call in calls]
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(str(message["tool_call_id"]))
    return changed


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """The same conversation with one call to a message: each is followed by its result, as if it had been made then."""
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = _calls(message)
        if len(calls) < 2:
            yield message
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = list(messages[index:end])
        index = end
        for number, call in enumerate(calls):
            yield {**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            yield from own
            results = [result for result in results if result not in own]
        yield from results


# --- our own text


def _write_out(messages: Sequence[Message], tools: RequestedTools | None) -> list[Message]:
    written: list[Message] = []
    may_join = False  # whether the last message is of results, which what the user says next joins
    for message in messages:
        role, text = message["role"], str(message["content"])
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        elif calls := _calls(message):
            text = "\n".join(([text] if text else []) + [_call_text(call) for call in calls])
        if may_join and role == "user":
            written[-1]["content"] = f"{written[-1]['content']}\n{text}"
        else:
            written.append({"role": role, "content": text})
        may_join = role == "user" and (message["role"] == "tool" or may_join)
    if tools is None:
        return written
    if written and written[0]["role"] == "system":
        first: Message = {"role": "system", "content": f"{written[0]['content']}\n\n{describe(tools)}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": describe(tools)}, *written]


def describe(tools: RequestedTools) -> str:
    """The text that tells a model of the tools. How many calls it may write, and whether it must, is part of it."""
    functions = "\n".join(_to_json(_definition(function)) for function in tools.functions)
    if tools.choice.name is not None:
        demand = f"Call the function {tools.choice.name}."
    elif tools.choice.must_call:
        demand = "Call at least one function." if tools.is_parallel else "Call exactly one function."
    else:
        number = "one or more functions" if tools.is_parallel else "one function"
        demand = f"You may call {number} to assist with the user query. If none is needed, answer without a call."
    return (
        f"# Tools\n\n{demand}\n\nThe functions, as JSON, one to a line:\n<tools>\n{functions}\n</tools>\n\n"
        f"Write each call as a JSON object with the name and the arguments, between {HERMES_OPEN} and {HERMES_CLOSE}:\n"
        f'{HERMES_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{HERMES_CLOSE}'
    )


def _call_text(call: Mapping[str, object]) -> str:
    return f"{HERMES_OPEN}\n{_to_json(call['function'])}\n{HERMES_CLOSE}"


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
