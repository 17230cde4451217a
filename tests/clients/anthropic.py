"""Anthropic's own client: messages whole and streamed, tools and their results, counting tokens, errors."""

import os
from typing import Any

import anthropic

MODEL = os.environ["PENSTOCK_MODEL"]
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city now",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

client = anthropic.Anthropic(max_retries=0, timeout=120)

message = client.messages.create(model=MODEL, messages=PARIS, extra_body={"temperature": 0}, max_tokens=24)
text = "".join(block.text for block in message.content if block.type == "text")
assert "Paris" in text
assert message.usage.output_tokens > 0
assert message.stop_reason in ("end_turn", "max_tokens")
print("did: message")

assert client.messages.create(model=MODEL, system="Be short.", messages=PARIS, max_tokens=8).content
print("did: system prompt")

with client.messages.stream(model=MODEL, messages=PARIS, extra_body={"temperature": 0}, max_tokens=24) as stream:
    assert "".join(stream.text_stream) == text
    assert stream.get_final_message().stop_reason == message.stop_reason
print("did: streamed message")

call = client.messages.create(
    model=MODEL, messages=PARIS, tools=[TOOL], tool_choice={"type": "any"}, extra_body={"temperature": 0}, max_tokens=64
)
uses = [block for block in call.content if block.type == "tool_use"]
assert uses[0].input["city"] in ("Rome", "Bern")
results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]
after: Any = [*PARIS, {"role": "assistant", "content": call.content}, {"role": "user", "content": results}]
assert client.messages.create(model=MODEL, messages=after, tools=[TOOL], max_tokens=16).content is not None
print("did: tool use and its result")

read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
assert client.messages.count_tokens(model=MODEL, messages=PARIS).input_tokens == read
print("did: counting tokens")

try:
    client.with_options(api_key="sk-penstock-" + "f" * 48).messages.create(model=MODEL, messages=PARIS, max_tokens=8)
except anthropic.AuthenticationError as error:
    assert error.status_code == 401
else:
    raise AssertionError("a wrong key was taken")
print("did: errors as its exceptions")
