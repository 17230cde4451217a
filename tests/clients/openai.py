"""OpenAI's own client: models, chats whole and streamed, completions, structured output, tools, errors."""

import asyncio
import json
import os
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = os.environ["PENSTOCK_MODEL"]
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Bern"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


client = openai.OpenAI(max_retries=0, timeout=120)

assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(MODEL).id == MODEL
print("did: models")

chat = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=24)
assert "Paris" in (chat.choices[0].message.content or "")
assert chat.usage is not None
print("did: chat")

chunks = list(
    client.chat.completions.create(
        model=MODEL, messages=PARIS, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
)
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert text == chat.choices[0].message.content
assert chunks[-1].usage is not None
print("did: streamed chat with usage")

with client.chat.completions.stream(model=MODEL, messages=PARIS, temperature=0, max_tokens=24) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.content == text
print("did: stream helper")

completion = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
assert "Paris" in completion.choices[0].text
print("did: completion")

parsed = client.chat.completions.parse(model=MODEL, messages=PARIS, response_format=City, temperature=0, max_tokens=64)
assert isinstance(parsed.choices[0].message.parsed, City)
print("did: structured output (parse)")

call = client.chat.completions.create(
    model=MODEL, messages=PARIS, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=64
)
(wanted,) = (call.choices[0].message.tool_calls or [])[:1]
assert json.loads(wanted.function.arguments)["city"] in ("Rome", "Bern")
after: Any = [
    *PARIS,
    call.choices[0].message,
    *({"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in call.choices[0].message.tool_calls),
]
assert client.chat.completions.create(model=MODEL, messages=after, tools=[TOOL], max_tokens=16).choices
print("did: tool call and its result")


async def ask_many() -> None:
    async with openai.AsyncOpenAI(max_retries=0, timeout=120) as many:
        asked = [many.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=8) for _ in range(8)]
        assert len(await asyncio.gather(*asked)) == 8


asyncio.run(ask_many())
print("did: eight at once (AsyncOpenAI)")

try:
    client.with_options(api_key="sk-penstock-" + "f" * 48).models.list()
except openai.AuthenticationError as error:
    assert error.status_code == 401
else:
    raise AssertionError("a wrong key was taken")
try:
    client.chat.completions.create(model="none", messages=PARIS)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
print("did: errors as its exceptions")

try:
    answer = client.responses.create(model=MODEL, input="What is the capital of France?", max_output_tokens=24)
except openai.NotFoundError:
    print("not: responses, the API has no /v1/responses yet")
else:
    assert answer.output_text
    print("did: responses")
