import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from importlib.metadata import version

import httpx
import msgspec
import pytest

from penstock.router.api.asgi import make_app
from penstock.router.config import GatewayConfig
from penstock.wire.errors import DeadlineExceeded, EngineFault, Overloaded, ReplicaLost
from penstock.wire.frames import Finish, unpack_token_ids
from penstock.wire.openai import ChatCompletion, ErrorDetail, ErrorResponse, ModelList, TextCompletion
from tests.unit.router.http_fakes import CONTEXT, IM_END, IM_START, KEY, MODEL, VOCAB_SIZE, Script, running_gateway


def error_of(response: httpx.Response) -> ErrorDetail:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-penstock-request-id"]
    return msgspec.json.decode(response.content, type=ErrorResponse).error


def chat_of(response: httpx.Response) -> ChatCompletion:
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=ChatCompletion)


def text_of(response: httpx.Response) -> TextCompletion:
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=TextCompletion)


# --- answers


async def test_a_chat_is_answered_with_text_usage_and_receipt() -> None:
    async with running_gateway(Script("Paris.")) as world:
        response = await world.chat()
        answer = chat_of(response)

        assert answer.choices[0].message.content == "Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        assert answer.id == f"chatcmpl-{response.headers['x-penstock-request-id']}"
        assert {
            name: value
            for name, value in response.headers.items()
            if name.startswith("x-penstock") and name != "x-penstock-request-id"
        } == {
            "x-penstock-tier": "edge",
            "x-penstock-tier-reason": "only tier",
            "x-penstock-replica": "replica-1",
            "x-penstock-cached-tokens": "16",
            "x-penstock-predicted-ttft-ms": "12.5",
        }
        assert world.dispatcher.num_open == 0


async def test_messages_go_through_the_chat_template() -> None:
    async with running_gateway() as world:
        parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you<|im_end|>"}]
        chat_of(
            await world.chat(messages=[{"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}])
        )
        (generation,) = world.dispatcher.generations

        prompt = [
            IM_START,
            *b"system\nBe kind",
            IM_END,
            *b"\n",
            IM_START,
            *b"user\nHi you<|im_end|>",
            IM_END,
            *b"\n",
            IM_START,
            *b"assistant",
        ]
        assert unpack_token_ids(generation.packed_token_ids) == prompt
        assert generation.num_prompt_tokens == len(prompt)
        assert (generation.tenant, len(generation.salt), generation.pools) == ("tenant-1", 32, ("pool-a",))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
async def test_a_completions_prompt_is_text_or_token_ids_or_several(prompt: object, expected: list[bytes]) -> None:
    async with running_gateway() as world:
        answer = text_of(await world.complete(prompt=prompt))

        assert [
            bytes(unpack_token_ids(generation.packed_token_ids)) for generation in world.dispatcher.generations
        ] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage
        assert answer.usage.prompt_tokens == sum(map(len, expected))


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", 1], ["a", [1]], [VOCAB_SIZE], [-1], [[1], [2**40]], ["a", ""], ["a"] * 129, [[1]] * 129],
)
async def test_a_prompt_that_can_not_be_read_is_refused(prompt: object) -> None:
    async with running_gateway() as world:
        response = await world.complete(prompt=prompt)

        assert response.status_code == 400
        assert error_of(response).param == "prompt"
        assert not world.dispatcher.generations


async def test_a_prompt_that_is_too_long_by_itself_is_read_no_further_than_that() -> None:
    async with running_gateway() as world:
        short = await world.complete(prompt="x" * 512)
        response = await world.complete(prompt="x" * 20_000)

        assert "513 tokens were requested: 512 in the prompt" in error_of(short).message
        assert response.status_code == 400
        assert error_of(response).code == "context_length_exceeded"
        assert "maximum context length is 512 tokens. However, the prompt alone has more" in error_of(response).message


async def test_a_stop_string_aborts_the_sequence() -> None:
    async with running_gateway(Script("one two three", hold_after=9)) as world:
        answer = chat_of(await world.chat(stop=["nothing", " tw"]))

        assert answer.choices[0].message.content == "one"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len("one tw")
        assert world.dispatcher.num_open == 0


async def test_siblings_start_when_the_first_choices_first_token_is_there() -> None:
    async with running_gateway(Script("ab")) as world:
        answer = chat_of(await world.chat(n=3, seed=5))
        generations = world.dispatcher.generations

        assert world.dispatcher.given_at_start[0] == []
        assert all(given[0] >= 1 for given in world.dispatcher.given_at_start[1:])
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert generations[0].sampling.seed == 5
        assert len({generation.sampling.seed for generation in generations}) == 3
        assert len({generation.request_id for generation in generations}) == 3
        assert answer.usage.completion_tokens == 6
        assert answer.usage.prompt_tokens == generations[0].num_prompt_tokens


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    async with running_gateway() as world:
        answer = text_of(await world.complete(prompt=["a", "b"], n=2, seed=1))

        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        seeds = {unpack_token_ids(g.packed_token_ids)[0]: [] for g in world.dispatcher.generations}
        for generation in world.dispatcher.generations:
            seeds[unpack_token_ids(generation.packed_token_ids)[0]].append(generation.sampling.seed)
        assert seeds[ord("a")] == seeds[ord("b")]


async def test_too_many_choices_are_refused() -> None:
    async with running_gateway() as world:
        response = await world.complete(prompt=["a"] * 65, n=2)

        assert (response.status_code, error_of(response).param) == (400, "n")


async def test_token_ids_are_returned_where_asked_for() -> None:
    async with running_gateway(Script(deltas=[[*b"ab"], [IM_END]])) as world:
        assert chat_of(await world.chat(return_token_ids=True)).choices[0].token_ids == [*b"ab", IM_END]
        assert text_of(await world.complete(return_token_ids=True)).choices[0].token_ids == [*b"ab", IM_END]
        assert "token_ids" not in (await world.chat()).text


async def test_chat_logprobs_have_bytes() -> None:
    async with running_gateway(Script(deltas=[[0xC3, 0xA9]])) as world:
        logprobs = chat_of(await world.chat(logprobs=True, top_logprobs=2)).choices[0].logprobs

        assert logprobs is not None
        assert [item.bytes for item in logprobs.content] == [[0xC3], [0xA9]]
        assert [(top.token, top.logprob, top.bytes) for top in logprobs.content[0].top_logprobs] == [
            ("\0", -1.0, [0]),
            ("\x01", -2.0, [1]),
        ]


async def test_legacy_logprobs_have_offsets_and_the_chosen_token() -> None:
    async with running_gateway(Script(deltas=[[0x61, 0xC3, 0xA9, 0x62]])) as world:
        logprobs = text_of(await world.complete(logprobs=1)).choices[0].logprobs

        assert logprobs is not None
        assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
        assert logprobs.text_offset == [0, 1, 1, 2]
        assert logprobs.top_logprobs[0] == {"\0": -1.0, "a": -0.5}


async def test_logprobs_that_an_engine_does_not_have_are_null() -> None:
    async with running_gateway(Script(has_logprobs=False)) as world:
        assert chat_of(await world.chat(logprobs=True)).choices[0].logprobs is None
        assert text_of(await world.complete(logprobs=1)).choices[0].logprobs is None


# --- refusals


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Authorization": ""}, "must be 'Bearer'"),
        ({"Authorization": "Basic abc"}, "must be 'Bearer'"),
        ({"Authorization": "Bearer nonsense"}, "malformed"),
        ({"Authorization": f"Bearer {KEY[:-1]}0"}, "unknown"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x")],
)
async def test_a_bad_key_is_refused(headers: dict[str, str], words: str, method: str, path: str) -> None:
    async with running_gateway() as world:
        response = await world.client.request(method, path, headers=headers)

        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert words in error_of(response).message
        assert KEY[:-1] not in response.text


async def test_a_missing_key_is_refused() -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        response = await world.chat()

        assert (response.status_code, error_of(response).code) == (401, "invalid_api_key")


async def test_an_unknown_model_is_refused() -> None:
    async with running_gateway() as world:
        response = await world.chat(model="gpt-9")

        assert response.status_code == 404
        assert error_of(response) == ErrorDetail(
            message="The model 'gpt-9' does not exist or you do not have access to it.",
            type="invalid_request_error",
            param="model",
            code="model_not_found",
        )


async def test_a_request_beyond_the_context_is_refused() -> None:
    async with running_gateway() as world:
        response = await world.chat(max_tokens=CONTEXT)

        assert (response.status_code, error_of(response).code) == (400, "context_length_exceeded")
        assert not world.dispatcher.generations


async def test_stream_options_need_a_stream() -> None:
    async with running_gateway() as world:
        assert (await world.chat(stream_options={"include_usage": True})).status_code == 400


async def test_a_body_too_large_is_refused_by_its_length_and_while_it_comes() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with running_gateway(config=GatewayConfig(max_body_bytes=1000)) as world:
        announced = await world.client.post("/v1/chat/completions", content=b" " * 2000)
        flowing = await world.client.post("/v1/chat/completions", content=chunks())

        for response in (announced, flowing):
            assert (response.status_code, error_of(response).code) == (413, "body_too_large")


async def test_a_body_that_does_not_come_is_refused_in_time() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with running_gateway(config=GatewayConfig(body_timeout_s=0.01)) as world:
        response = await world.client.post("/v1/chat/completions", content=endless())

        assert (response.status_code, error_of(response).code) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", "/v1/completions", "POST"), ("POST", "/v1/models", "GET, HEAD"), ("DELETE", "/healthz", "GET, HEAD")],
)
async def test_a_wrong_method_is_refused(method: str, path: str, allow: str) -> None:
    async with running_gateway() as world:
        response = await world.client.request(method, path)

        assert (response.status_code, response.headers["allow"]) == (405, allow)
        assert error_of(response).code == "method_not_allowed"


async def test_more_requests_than_a_gateway_holds_are_refused_and_counted_off_again() -> None:
    gate = asyncio.Event()
    async with running_gateway(Script(hold_start=gate), GatewayConfig(max_ongoing_requests=2)) as world:
        held = [asyncio.create_task(world.chat()), asyncio.create_task(world.complete())]
        await world.dispatcher.until(lambda: world.dispatcher.num_waiting == 2)
        refused = await world.chat()
        others = [await world.client.get(path) for path in ("/v1/models", "/healthz", "/metrics")]
        gate.set()

        assert (refused.status_code, error_of(refused).code, refused.headers["retry-after"]) == (
            503,
            "overloaded",
            "1",
        )
        assert [other.status_code for other in others] == [200, 200, 200]
        assert [(await task).status_code for task in held] == [200, 200]
        assert [(await world.chat()).status_code for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/%ff"])
async def test_an_unknown_path_is_refused(path: str) -> None:
    async with running_gateway() as world:
        response = await world.client.post(path)

        assert (response.status_code, error_of(response).code) == (404, "not_found")


async def test_an_admin_port_has_the_metrics_and_nothing_of_the_api() -> None:
    async with running_gateway(config=GatewayConfig(admin_port=8001)) as world:

        async def statuses(base: str) -> list[int]:
            return [
                (await world.client.get(base + path)).status_code
                for path in ("/metrics", "/healthz", "/v1/models", "/openapi.json")
            ]

        assert await statuses("http://gateway:8001") == [200, 200, 404, 404]
        assert await statuses("http://gateway:8000") == [404, 200, 200, 200]


# --- failures behind the surface


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (Script(refusal=Overloaded("full", retry_after_s=2.2)), 503, "overloaded"),
        (Script(refusal=DeadlineExceeded("late")), 504, "deadline_exceeded"),
        (Script(deltas=[], error=ReplicaLost("gone")), 502, "replica_lost"),
        (Script(deltas=[], error=EngineFault("nan")), 500, "engine_fault"),
        (Script(deltas=[], error=ZeroDivisionError("secret")), 500, "internal_error"),
    ],
)
async def test_a_failure_before_the_first_token_is_a_status(
    script: Script, status: int, code: str, stream: bool
) -> None:
    async with running_gateway(script) as world:
        response = await world.chat(stream=stream)

        assert (response.status_code, error_of(response).code) == (status, code)
        assert "secret" not in response.text
        assert response.headers.get("retry-after") == (str(math.ceil(2.2)) if status == 503 else None)
        assert world.dispatcher.num_open == 0


async def test_a_failure_of_one_choice_fails_the_answer_and_frees_all() -> None:
    async with running_gateway(Script("ab", error=ReplicaLost("gone"))) as world:
        response = await world.chat(n=4)

        assert (response.status_code, error_of(response).code) == (502, "replica_lost")
        assert world.dispatcher.num_open == 0


# --- pages


async def test_models_are_listed_and_described() -> None:
    async with running_gateway() as world:
        listed = msgspec.json.decode((await world.client.get("/v1/models")).content, type=ModelList)
        one = await world.client.get(f"/v1/models/{MODEL}")
        other = await world.client.get("/v1/models/some/other")

        assert [(model.id, model.max_model_len, model.exact, model.owned_by) for model in listed.data] == [
            (MODEL, CONTEXT, False, "penstock")
        ]
        assert msgspec.json.decode(one.content)["id"] == MODEL
        assert (other.status_code, error_of(other).code) == (404, "model_not_found")


async def test_health_needs_no_replica_and_readiness_one_within_the_time_that_a_request_may_wait() -> None:
    now_s = 0.0
    async with running_gateway(config=GatewayConfig(queue_timeout_s=30.0)) as world:
        app = make_app(dataclasses.replace(world.deps, clock=lambda: now_s))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:

            async def statuses() -> tuple[int, int]:
                return (await client.get("/healthz")).status_code, (await client.get("/readyz")).status_code

            pools = list(world.pools)
            world.pools[:] = [row._replace(num_connected=0) for row in pools]
            assert await statuses() == (200, 503), "it has met none yet"
            world.pools[:] = pools
            assert await statuses() == (200, 200)
            world.pools[:] = [row._replace(num_connected=0) for row in pools]
            now_s += 30.0
            assert await statuses() == (200, 200), "requests wait for the next one"
            now_s += 0.1
            assert await statuses() == (200, 503)


async def test_other_servers_names_of_readiness_say_the_same_without_a_key() -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]
        for path in ("/health", "/ping"):
            assert (await world.client.get(path)).json() == {"status": "ready"}
            assert (await world.client.head(path)).status_code == 200
            assert (await world.client.post(path)).status_code == 405
    async with running_gateway() as world:
        world.pools.clear()
        assert [(await world.client.get(path)).status_code for path in ("/health", "/ping")] == [503, 503]


async def test_the_version_is_the_packages() -> None:
    async with running_gateway() as world:
        del world.client.headers["authorization"]

        assert (await world.client.get("/version")).json() == {"version": version("penstock")}


async def test_metrics_count_requests_tokens_and_replicas() -> None:
    async with running_gateway(Script("ab", finish=Finish.LENGTH)) as world:
        await world.chat()
        await world.chat(stream=True)
        await world.chat(temperature=9)
        await world.chat(model="gpt-9")
        page = await world.client.get("/metrics")

        assert page.headers["content-type"].startswith("text/plain")
        lines = set(page.text.splitlines())
        assert 'penstock_requests_total{code="200",model="tiny"} 2.0' in lines
        assert 'penstock_requests_total{code="400",model="none"} 1.0' in lines
        assert 'penstock_requests_total{code="404",model="none"} 1.0' in lines
        assert 'penstock_tokens_total{kind="output",model="tiny"} 4.0' in lines
        assert 'penstock_prefix_hit_tokens_total{model="tiny"} 32.0' in lines
        assert 'penstock_ttft_seconds_count{model="tiny"} 2.0' in lines
        assert 'penstock_tpot_seconds_count{model="tiny"} 2.0' in lines
        assert 'penstock_replicas{pool="pool-a",tier="edge"} 2.0' in lines


@pytest.mark.parametrize(("predicted", "cached", "true"), [(16, 32, 16), (32, 16, 16), (0, 16, 0)])
async def test_metrics_tell_how_true_the_index_was(predicted: int, cached: int, true: int) -> None:
    async with running_gateway(Script(predicted_tokens=predicted, cached_tokens=cached)) as world:
        await world.chat()
        value = world.metrics.registry.get_sample_value

        assert value("penstock_prefix_predicted_tokens_total", {"model": MODEL}) == predicted
        assert value("penstock_prefix_hit_tokens_total", {"model": MODEL}) == cached
        assert value("penstock_prefix_true_tokens_total", {"model": MODEL}) == true


async def test_the_app_speaks_lifespan() -> None:
    async with running_gateway() as world:
        inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        sent: list[str] = []

        async def receive() -> dict[str, str]:
            return inbox.pop(0)

        async def send(message: object) -> None:
            sent.append(message["type"])  # type: ignore[index]

        await world.app({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]

        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
