"""LangChain's ChatOpenAI: invoke, stream, batch, structured output by schema and by function, bound tools."""

import os
from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["PENSTOCK_MODEL"]
PARIS = "What is the capital of France?"


class City(BaseModel):
    """A city and whether it is a capital."""

    name: Literal["Paris", "Rome"] = Field(description="The city's name")
    is_capital: bool


class GetWeather(BaseModel):
    """The weather in a city now."""

    city: Literal["Rome", "Bern"]


model: Any = ChatOpenAI(model=MODEL, temperature=0, max_tokens=64, max_retries=0, timeout=120)

whole = model.invoke(PARIS)
assert "Paris" in whole.content
assert whole.usage_metadata["output_tokens"] > 0
print("did: invoke")

assert "".join(chunk.content for chunk in model.stream(PARIS)) == whole.content
print("did: stream")

assert len(model.batch([PARIS] * 4)) == 4
print("did: batch of four")

for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(City, method=method).invoke(PARIS), City)
    print(f"did: structured output ({method})")

bound = model.bind_tools([GetWeather], tool_choice="required")
call = bound.invoke(PARIS)
assert call.tool_calls[0]["name"] == "GetWeather"
assert call.tool_calls[0]["args"]["city"] in ("Rome", "Bern")
results = [ToolMessage("sunny", tool_call_id=each["id"]) for each in call.tool_calls]
assert model.bind_tools([GetWeather]).invoke([("user", PARIS), call, *results])
print("did: bound tools and their results")
