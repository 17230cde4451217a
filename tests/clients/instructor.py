"""Instructor: a pydantic model of an answer, by tools and by JSON schema, and one that is read while it streams."""

import os
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

MODEL = os.environ["PENSTOCK_MODEL"]


class City(BaseModel):
    """A city and whether it is a capital."""

    name: Literal["Paris", "Rome"]
    is_capital: bool
    rank: int = Field(ge=1, le=9)


ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 96,
    "max_retries": 1,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client: Any = instructor.from_openai(openai.OpenAI(max_retries=0, timeout=120), mode=mode)
    assert isinstance(client.chat.completions.create(response_model=City, **ASKED), City)
    print(f"did: a model of the answer ({mode.name})")

client = instructor.from_openai(openai.OpenAI(max_retries=0, timeout=120), mode=instructor.Mode.TOOLS)
parts = list(client.chat.completions.create_partial(response_model=City, **ASKED))
assert parts[-1].name in ("Paris", "Rome")
print("did: a model of the answer, part by part")
