"""LiteLLM: chats whole and streamed by its OpenAI route, structured output, tools, errors as its own."""

import json
import os
from typing import Any, Literal

import litellm
from pydantic import BaseModel

WHERE: Any = {
    "model": f"openai/{os.environ['PENSTOCK_MODEL']}",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "temperature": 0,
    "num_retries": 0,
}
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Bern"]}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


chat: Any = litellm.completion(messages=PARIS, max_tokens=24, **WHERE)
text = chat.choices[0].message.content
assert "Paris" in text
print("did: chat")

streamed: Any = litellm.completion(messages=PARIS, max_tokens=24, stream=True, **WHERE)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
print("did: streamed chat")

parsed: Any = litellm.completion(messages=PARIS, max_tokens=64, response_format=City, **WHERE)
City.model_validate_json(parsed.choices[0].message.content)
print("did: structured output (a pydantic model)")

call: Any = litellm.completion(messages=PARIS, max_tokens=64, tools=[TOOL], tool_choice="required", **WHERE)
assert json.loads(call.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Rome", "Bern")
print("did: tool call")

try:
    litellm.completion(messages=PARIS, **(WHERE | {"api_key": "sk-penstock-" + "f" * 48}))
except litellm.AuthenticationError as error:
    assert error.status_code == 401
else:
    raise AssertionError("a wrong key was taken")
print("did: errors as its exceptions")
