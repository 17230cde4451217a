from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from penstock.router.api.openapi import document
from penstock.wire.bodies import decode_chat, decode_completion, decode_messages, decode_responses
from penstock.wire.errors import HTTP_ERRORS, InvalidRequest
from tests.unit.router.dialects.events import named_events
from tests.unit.router.http_fakes import KEY, MODEL, Script, events, running_gateway

DOCUMENT = msgspec.json.decode(msgspec.json.encode(document()))
USER = {"role": "user", "content": "x"}


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for item in node.values():
            yield from references(item)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_every_reference_leads_to_a_valid_schema() -> None:
    schemas = DOCUMENT["components"]["schemas"]

    assert {ref.removeprefix("#/components/schemas/") for ref in references(DOCUMENT)} <= schemas.keys()
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


async def test_every_documented_route_is_served_and_secured_as_described() -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        for path, methods in DOCUMENT["paths"].items():
            for method, operation in methods.items():
                if method == "parameters":  # of the path
                    continue
                response = await world.client.request(method.upper(), path.replace("{model}", MODEL))

                is_open = operation.get("security") == []
                assert response.status_code == (200 if is_open else 401), path
                assert str(response.status_code) in operation["responses"]


def test_every_error_of_the_table_is_among_a_generations_responses() -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        documented = {int(status) for status in DOCUMENT["paths"][path]["post"]["responses"]}

        assert documented == {200, *(row.status for row in HTTP_ERRORS.values())} - {405}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("extra", [{}, {"n": 2, "return_token_ids": True}, {"logprobs": 1}])
async def test_answers_and_chunks_follow_their_schemas(path: str, extra: dict[str, object]) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    content = operation["responses"]["200"]["content"]
    is_chat = path.startswith("/v1/chat")
    body: dict[str, Any] = {"model": MODEL, **({"messages": [USER]} if is_chat else {"prompt": "x"}), **extra}
    if is_chat and "logprobs" in body:
        body["logprobs"] = True

    async with running_gateway(Script("ab")) as world:
        whole = await world.client.post(path, json=body, headers={"x-penstock-stay": "edge"})
        stream = await world.client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})

        validator(content["application/json"]["schema"]["$ref"].rpartition("/")[2]).validate(whole.json())
        chunk = validator(content["text/event-stream"]["schema"]["contentSchema"]["$ref"].rpartition("/")[2])
        for event in events(stream)[:-1]:
            chunk.validate(msgspec.json.decode(event))
        described = operation["responses"]["200"]["headers"].keys()
        ours = {name for name in whole.headers if name.startswith("x-penstock")}
        assert ours | {"x-penstock-ignored-fields"} == described


async def test_errors_follow_their_schema() -> None:
    async with running_gateway() as world:
        validator("ErrorResponse").validate((await world.chat(temperature=9)).json())
        assert KEY not in (await world.chat(temperature=9)).text


SAMPLES: list[dict[str, object]] = [
    *({}, {"temperature": 3}, {"n": 0}, {"n": 2}, {"stop": "x"}, {"stop": ["x"] * 17}, {"foo": 1}),
    *({"logit_bias": {"1": 5}}, {"logit_bias": {"1": 500}}, {"seed": None}, {"top_k": -2}),
]


@pytest.mark.parametrize("fields", SAMPLES)
@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_the_schema_accepts_what_the_gateway_reads(name: str, fields: dict[str, object]) -> None:
    body = {"model": "m", **({"messages": [USER]} if name == "ChatRequest" else {"prompt": ["a", "b"]}), **fields}
    decode = decode_chat if name == "ChatRequest" else decode_completion
    try:
        decode(msgspec.json.encode(body))
        is_read = True
    except InvalidRequest:
        is_read = False

    assert validator(name).is_valid(body) == is_read


@pytest.mark.parametrize(
    ("prompt", "is_valid"),
    [("a", True), ([1, 2], True), ([[1], [2]], True), (["a", 1], False), ([], False), ([[]], False), ([-1], False)],
)
def test_the_schema_of_a_prompt_takes_one_kind_only(prompt: object, is_valid: bool) -> None:
    assert validator("CompletionRequest").is_valid({"model": "m", "prompt": prompt}) == is_valid


DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"max_tokens": 5, "messages": [USER]}),
    ("/v1/responses", {"input": "x", "instructions": "y", "metadata": {"a": "b"}}),
]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_answers_and_events_of_the_other_apis_follow_their_schemas(path: str, body: dict[str, Any]) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    content = operation["responses"]["200"]["content"]
    error = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]

    async with running_gateway(Script("ab")) as world:
        whole = await world.post(path, **body)
        stream = await world.post(path, **body, stream=True)
        refused = await world.post(path, **body, temperature=9)

        validator(content["application/json"]["schema"]["$ref"].rpartition("/")[2]).validate(whole.json())
        event = validator(content["text/event-stream"]["schema"]["contentSchema"]["$ref"].rpartition("/")[2])
        for _, data in named_events(stream):
            event.validate(data)
        validator(error.rpartition("/")[2]).validate(refused.json())


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 3}, {"top_p": 0.5}, {"foo": 1}, {"stream": None}, {"seed": "x"}]
)
@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_the_schema_of_another_api_accepts_what_the_gateway_reads(
    path: str, body: dict[str, Any], fields: dict[str, object]
) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    decode = decode_messages if path == "/v1/messages" else decode_responses
    given = {"model": "m", **body, **fields}
    try:
        decode(msgspec.json.encode(given))
        is_read = True
    except InvalidRequest:
        is_read = False

    assert validator(schema.rpartition("/")[2]).is_valid(given) == is_read
