"""Requests of the other APIs, and the named events of their streams, as the tests read them."""

from typing import Any

import httpx
import msgspec

from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Generation
from penstock.wire.frames import unpack_token_ids
from tests.unit.router.http_fakes import CONTEXT, MODEL, TOKENIZER

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "Weather of a city", "input_schema": PARAMETERS}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": PARAMETERS,
    "strict": True,
}
ARGUMENTS = ['{"city": "Rome"}', '{"city": "Bérn \\"x\\""}']
CALLS = "\n".join(f'<tool_call>\n{{"name": "get_weather", "arguments": {text}}}\n</tool_call>' for text in ARGUMENTS)
ANSWER = f"I look.\n\n{CALLS}"
"""An answer of a text and two calls."""
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Rome and Bern?"}]
ROOMY = ServedModel(MODEL, ("pool-a",), TOKENIZER, lambda: 8 * CONTEXT, "0123456789abcdef")
"""The model with room for tools."""


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Names and data of the events of a stream, which must end behind one."""
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    events = []
    for part in parts[:-1]:
        name, data = part.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        events.append((name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))))
    assert all(data["type"] == name for name, data in events)
    return events


def squeeze(names: list[str]) -> list[str]:
    """The names, of equal ones that follow each other one."""
    return [name for index, name in enumerate(names) if not index or names[index - 1] != name]


def prompt(generation: Generation) -> str:
    return TOKENIZER.decode(unpack_token_ids(generation.packed_token_ids), skip_special=False)
