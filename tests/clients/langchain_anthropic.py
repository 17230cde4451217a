"""LangChain's ChatAnthropic: invoke, stream, structured output, bound tools."""

import os
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from pydantic import BaseModel

PARIS = "What is the capital of France?"


class City(BaseModel):
    """A city and whether it is a capital."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


class GetWeather(BaseModel):
    """The weather in a city now."""

    city: Literal["Rome", "Bern"]


model: Any = ChatAnthropic(
    model=os.environ["PENSTOCK_MODEL"],
    base_url=os.environ["ANTHROPIC_BASE_URL"],
    temperature=0,
    max_tokens=64,
    max_retries=0,
    timeout=120,
)

whole = model.invoke(PARIS)
assert "Paris" in whole.content
assert whole.usage_metadata["output_tokens"] > 0
print("did: invoke")

texts = [chunk.text if isinstance(chunk.text, str) else chunk.text() for chunk in model.stream(PARIS)]
assert "".join(texts) == whole.content
print("did: stream")

assert isinstance(model.with_structured_output(City).invoke(PARIS), City)
print("did: structured output")

call = model.bind_tools([GetWeather], tool_choice="any").invoke(PARIS)
assert call.tool_calls[0]["args"]["city"] in ("Rome", "Bern")
print("did: bound tools")
