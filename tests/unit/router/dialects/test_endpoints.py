"""/v1/messages, /v1/messages/count_tokens and /v1/responses over HTTP: keys, errors, the order of events, usage."""

from typing import Any

import pytest

from penstock.router.config import GatewayConfig
from penstock.tenancy.tenants import Limits, Settings
from penstock.wire.errors import Overloaded, ReplicaLost
from penstock.wire.frames import Finish
from tests.unit.router.dialects.events import (
    ANSWER,
    ARGUMENTS,
    ASKED,
    FUNCTION,
    ROOMY,
    TOOL,
    named_events,
    prompt,
    squeeze,
)
from tests.unit.router.http_fakes import KEY, Script, World, running_gateway

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
TEXT_ITEM = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_ITEM = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


async def message(world: World, **fields: Any) -> Any:
    return await world.post(MESSAGES, **{"max_tokens": 400, "messages": ASKED, **fields})


async def respond(world: World, **fields: Any) -> Any:
    return await world.post(RESPONSES, **{"input": "Rome and Bern?", **fields})


# --- keys


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer sk-penstock-wrong"}, 200),
        ({"x-api-key": "sk-penstock-" + "0" * 48, "authorization": f"Bearer {KEY}"}, 401),
        ({"x-api-key": "sk-penstock-" + "0" * 48}, 401),
        ({}, 401),
    ],
)
async def test_the_key_may_come_in_anthropics_header(path: str, headers: dict[str, str], status: int) -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        body = {"model": "tiny", "max_tokens": 5, "messages": ASKED}
        response = await world.client.post(path, json=body, headers=headers)

        assert response.status_code == status, response.text


@pytest.mark.parametrize("path", [RESPONSES, "/v1/chat/completions", "/tokenize", "/v1/embeddings"])
async def test_anthropics_header_opens_no_other_path(path: str) -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        response = await world.client.post(path, json={}, headers={"x-api-key": KEY})

        assert response.status_code == 401


# --- /v1/messages


async def test_a_message_is_answered_whole_with_its_calls() -> None:
    async with running_gateway(Script(ANSWER), model=ROOMY) as world:
        answer = (await message(world, tools=[TOOL])).json()

        ids = [block.pop("id") for block in answer["content"][1:]]
        assert answer["content"] == [
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "name": "get_weather", "input": {"city": 'Bérn "x"'}},
        ]
        assert len(set(ids)) == 2
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")


async def test_a_streamed_message_has_its_events_in_order_and_the_same_content() -> None:
    async with running_gateway(Script(ANSWER), model=ROOMY) as world:
        response = await message(world, tools=[TOOL], stream=True)
        events = named_events(response)

        names = squeeze([name for name, _ in events])
        assert names == ["message_start", "ping", *BLOCK * 3, "message_delta", "message_stop"]
        indices = [data["index"] for name, data in events if name == "content_block_start"]
        assert indices == [0, 1, 2]
        texts = ["", "", ""]
        for name, data in events:
            if name == "content_block_delta":
                texts[data["index"]] += data["delta"].get("text", "") + data["delta"].get("partial_json", "")
        assert texts == ["I look.", *ARGUMENTS]
        assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert response.headers["request-id"] == response.headers["x-penstock-request-id"]


async def test_the_usage_is_the_chats_with_what_was_cached_apart() -> None:
    async with running_gateway(Script(cached_tokens=16)) as world:
        chat = (await world.chat(messages=ASKED)).json()["usage"]
        whole = (await message(world)).json()["usage"]
        events = dict(named_events(await message(world, stream=True)))

        assert whole == {
            "input_tokens": chat["prompt_tokens"] - 16,
            "cache_read_input_tokens": 16,
            "cache_creation_input_tokens": 0,
            "output_tokens": chat["completion_tokens"],
        }
        assert events["message_start"]["message"]["usage"] == whole | {"output_tokens": 1}
        assert events["message_delta"]["usage"] == whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        (Script("Paris."), {}, ("end_turn", None)),
        (Script("Paris.", finish=Finish.LENGTH), {}, ("max_tokens", None)),
        (Script("Paris."), {"stop_sequences": ["zz", "is"]}, ("stop_sequence", "is")),
        (Script("Paris."), {"stop_sequences": ["zz"]}, ("end_turn", None)),
    ],
)
async def test_the_reason_for_the_end_is_told(
    script: Script, fields: dict[str, Any], expected: tuple[str, str | None], stream: bool
) -> None:
    async with running_gateway(script) as world:
        response = await message(world, stream=stream, **fields)
        told = named_events(response)[-2][1]["delta"] if stream else response.json()

        assert (told["stop_reason"], told["stop_sequence"]) == expected


async def test_an_answer_goes_on_with_the_last_message_of_the_assistant() -> None:
    async with running_gateway() as world:
        await message(world, messages=[*ASKED, {"role": "assistant", "content": "In Ro"}])

        assert prompt(world.dispatcher.generations[0]).endswith("<|im_start|>assistant\nIn Ro")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [({"temperature": 9}, 400, "invalid_request_error"), ({"model": "no"}, 404, "not_found_error")],
)
async def test_errors_are_in_anthropics_form(fields: dict[str, Any], status: int, kind: str) -> None:
    async with running_gateway() as world:
        response = await message(world, **fields)

        error = response.json()
        assert response.status_code == status
        assert error.keys() == {"type", "error", "request_id"}
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert error["request_id"] == response.headers["request-id"]


async def test_errors_of_no_handler_are_in_anthropics_form_too() -> None:
    async with running_gateway(Script(refusal=Overloaded("full", retry_after_s=1))) as world:
        full, wrong = await message(world), await world.client.get(MESSAGES)

        assert (full.status_code, full.json()["error"]["type"]) == (503, "overloaded_error")
        assert full.headers["retry-after"] == "1"
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_a_message_that_fails_on_its_way_ends_with_an_error() -> None:
    async with running_gateway(Script("ab", error=ReplicaLost("the replica is gone"))) as world:
        name, data = named_events(await message(world, stream=True))[-1]

        assert name == "error"
        assert data["error"] == {"type": "api_error", "message": "the replica is gone"}


async def test_unknown_fields_are_named_or_refused() -> None:
    async with running_gateway() as world:
        taken = await message(world, metadata={"user_id": "u"}, made_up=1)
        told = [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}]
        nested = await message(world, messages=told)
        counted = await world.post(COUNT, messages=ASKED, metadata={})

        assert taken.headers["x-penstock-ignored-fields"] == "metadata, made_up"
        assert nested.headers["x-penstock-ignored-fields"] == "messages.content.cache_control"
        assert counted.headers["x-penstock-ignored-fields"] == "metadata"
    async with running_gateway(config=GatewayConfig(strict=True)) as world:
        refused = await message(world, made_up=1)

        assert refused.status_code == 400
        assert "made_up" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
async def test_hints_of_effort_are_taken_and_named_on_every_path(kind: str) -> None:
    thinking = {"type": kind, "budget_tokens": 1024} if kind == "enabled" else {"type": kind}
    async with running_gateway(config=GatewayConfig(strict=True)) as world:
        answers = [
            await message(world, thinking=thinking, output_config={"effort": "max"}),
            await respond(world, reasoning={"effort": "high"}, text={"verbosity": "low"}),
            await world.chat(reasoning_effort="minimal", verbosity="high"),
        ]

        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert [{*answer.headers["x-penstock-ignored-fields"].split(", ")} for answer in answers] == [
            {"thinking", "output_config.effort"},
            {"reasoning.effort", "text.verbosity"},
            {"reasoning_effort", "verbosity"},
        ]


# --- /v1/messages/count_tokens


async def test_the_tokens_counted_are_those_of_the_message() -> None:
    fields: dict[str, Any] = {"messages": ASKED, "system": "Be brief.", "tools": [TOOL]}
    async with running_gateway(model=ROOMY) as world:
        counted = await world.post(COUNT, **fields)
        await message(world, **fields)

        assert counted.json() == {"input_tokens": world.dispatcher.generations[0].num_prompt_tokens}
        assert len(world.dispatcher.generations) == 1


async def test_counting_counts_among_the_tenants_requests() -> None:
    settings = Settings(limits=Limits(requests_per_minute=2))
    async with running_gateway(settings=settings, num_gateways=1) as world:
        statuses = [(await world.post(COUNT, messages=ASKED)).status_code for _ in range(3)]

        assert statuses == [200, 200, 429]


# --- /v1/responses


async def test_a_response_is_answered_whole_with_its_calls() -> None:
    async with running_gateway(Script(ANSWER), model=ROOMY) as world:
        answer = (await respond(world, tools=[FUNCTION], metadata={"a": "b"}, store=True)).json()

        text, *calls = answer["output"]
        assert text["content"][0]["text"] == "I look."
        assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
            ("function_call", "get_weather", arguments) for arguments in ARGUMENTS
        ]
        assert (answer["status"], answer["store"], answer["metadata"]) == ("completed", False, {"a": "b"})
        assert answer["tools"] == [FUNCTION]
        assert answer["usage"]["output_tokens"] == len(ANSWER.encode())


async def test_a_streamed_response_has_its_events_in_order_and_ends_with_the_whole_answer() -> None:
    async with running_gateway(Script(ANSWER), model=ROOMY) as world:
        events = named_events(await respond(world, tools=[FUNCTION], stream=True))
        whole = (await respond(world, tools=[FUNCTION])).json()

        names = squeeze([name for name, _ in events])
        assert names == [
            *("response.created", "response.in_progress"),
            *(*TEXT_ITEM, *CALL_ITEM, *CALL_ITEM),
            "response.completed",
        ]
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        last = events[-1][1]["response"]
        assert [_plain(item) for item in last["output"]] == [_plain(item) for item in whole["output"]]
        assert last.keys() == whole.keys()
        assert last["usage"] == whole["usage"]
        done = [data["item"] for name, data in events if name == "response.output_item.done"]
        assert done == last["output"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(stream: bool) -> None:
    async with running_gateway(Script("Pari", finish=Finish.LENGTH)) as world:
        response = await respond(world, stream=stream)
        answer = named_events(response)[-1][1]["response"] if stream else response.json()

        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert answer["output"][0]["status"] == "incomplete"
        assert answer["output"][0]["content"][0]["text"] == "Pari"


async def test_a_response_that_fails_on_its_way_says_so() -> None:
    async with running_gateway(Script("ab", error=ReplicaLost("the replica is gone"))) as world:
        events = named_events(await respond(world, stream=True))
        name, data = events[-1]

        assert name == "response.failed"
        assert data["response"]["error"] == {"code": "server_error", "message": "the replica is gone"}
        assert data["sequence_number"] == len(events) - 1


async def test_errors_of_responses_are_openais() -> None:
    async with running_gateway() as world:
        refused = await respond(world, previous_response_id="resp_1")
        kept = await world.client.get("/v1/responses/resp_1")

        assert refused.json()["error"]["param"] == "previous_response_id"
        assert kept.status_code == 404


# --- what all have in common


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_the_receipt_of_an_answer_is_found_by_its_id(path: str) -> None:
    async with running_gateway() as world:
        answer = await message(world) if path == MESSAGES else await respond(world)
        receipt = await world.client.get(f"/v1/receipts/{answer.json()['id']}")

        assert answer.headers["x-penstock-replica"] == "replica-1"
        assert receipt.json()["choices"][0]["replica"] == "replica-1"


async def test_embeddings_are_refused_with_a_sentence_to_those_with_a_key() -> None:
    async with running_gateway() as world:
        response = await world.post("/v1/embeddings", input="x")

        assert response.status_code == 404
        assert "No pool serves an embedding model" in response.json()["error"]["message"]


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """An item without its ids, which differ."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}
