"""Structured output through the whole platform, on the demo model, by the unmodified `openai` client."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from bench.support.platform_process import PlatformProcess, running_platform

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
  - name: demo
    served_names: [demo]
    engine: {{kv_memory_bytes: 100_000_000, max_num_seqs: 16, threads: 1}}
"""


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=30)
    country: str = pydantic.Field(max_length=30)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    founded: int = pydantic.Field(ge=-3000, le=2026)


SCHEMA = City.model_json_schema() | {"additionalProperties": False}
QUESTION: list[Any] = [{"role": "user", "content": "Describe the city of Paris."}]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


def test_the_client_parses_an_answer_into_its_own_type(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=City, temperature=0, max_tokens=200
    )

    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, City)
    assert choice.finish_reason == "stop"


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
    fields: Any = {"model": "demo", "messages": QUESTION, "response_format": wanted, "seed": 7, "max_tokens": 200}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))

    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


def test_every_choice_of_a_request_keeps_to_the_schema_and_the_choices_differ(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        n=4,
        temperature=1.0,
        seed=3,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )

    texts = [choice.message.content or "" for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("field", "value", "texts"),
    [
        ("guided_choice", ["blue", "green"], {"blue", "green"}),
        ("structured_outputs", {"regex": "[0-9]{2}-[0-9]{2}"}, None),
        ("guided_grammar", 'start: "<" ("a" | "b") ">"', {"<a>", "<b>"}),
    ],
)
def test_vllms_names_are_understood(client: openai.OpenAI, field: str, value: object, texts: set[str] | None) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=20, temperature=1.0, extra_body={field: value}
    )

    text = answer.choices[0].message.content or ""
    assert text in texts if texts else (len(text), text[2]) == (5, "-")


def test_json_mode_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo",
        prompt="A person as JSON: ",
        max_tokens=300,
        temperature=0,
        extra_body={"response_format": {"type": "json_object"}},
    )

    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.text), dict)
    assert choice.text.startswith("{")


def test_a_keyword_that_is_not_enforced_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}},
            },
        )

    assert caught.value.param == "response_format.json_schema.schema"


async def test_constrained_and_free_requests_run_side_by_side(platform: PlatformProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=200
    ) as client:

        async def ask(number: int) -> str:
            extra = {"guided_json": SCHEMA} if number % 2 else {}
            answer = await client.chat.completions.create(
                model="demo", messages=QUESTION, max_tokens=200 if extra else 30, seed=number, extra_body=extra
            )
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(ask(number) for number in range(12)))

    for number, text in enumerate(texts):
        if number % 2:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert text
