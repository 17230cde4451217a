"""What a browser asks and reads for a page of another origin."""

import httpx
import pytest

from penstock.router.config import GatewayConfig
from penstock.router.transport.cors import Cors, preflight_headers
from tests.unit.router.http_fakes import World, running_gateway

PAGE = "https://app.example.com"
OTHER = "https://evil.example.com"
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/tiny",
    "/tokenize",
    "/openapi.json",
    "/health",
]
SOME = GatewayConfig(cors_origins=("http://localhost:3000", PAGE))
ALL = GatewayConfig(cors_origins=("*",))


async def preflight(world: World, path: str, origin: str = PAGE, **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return await world.client.options(path, headers=asked)


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("path", PATHS)
async def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(path: str) -> None:
    names = "authorization,content-type,x-stainless-lang,x-penstock-stay"
    async with running_gateway(config=SOME) as world:
        del world.client.headers["authorization"]
        answer = await preflight(world, path, **{"access-control-request-headers": names})

        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert ("POST" if "completions" in path or path == "/tokenize" else "GET") in answer.headers[
            "access-control-allow-methods"
        ]
        assert answer.headers["access-control-allow-headers"] == names
        assert answer.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in answer.headers


async def test_an_allowed_page_may_read_answers_streams_and_errors() -> None:
    async with running_gateway(config=SOME) as world:
        world.client.headers["origin"] = PAGE
        responses = [
            await world.chat(),
            await world.chat(stream=True),
            await world.chat(temperature=9),
            await world.client.get("/v1/models"),
            await world.client.get("/nothing"),
            await world.client.get("/v1/models", headers={"authorization": "Bearer x"}),
        ]

        assert [response.status_code for response in responses] == [200, 200, 400, 200, 404, 401]
        for response in responses:
            assert cors_of(response) == {
                "access-control-allow-origin": PAGE,
                "access-control-expose-headers": "*",
            }


@pytest.mark.parametrize("config", [GatewayConfig(), SOME])
async def test_other_pages_and_others_than_pages_get_none_of_it(config: GatewayConfig) -> None:
    async with running_gateway(config=config) as world:
        refused = await preflight(world, "/v1/chat/completions", OTHER)
        answered = await world.client.get("/v1/models", headers={"origin": OTHER})
        without = await world.chat()
        no_preflight = await world.client.options("/v1/models", headers={"origin": PAGE})

        assert refused.status_code == no_preflight.status_code == 405
        assert answered.status_code == without.status_code == 200
        assert cors_of(refused) == cors_of(answered) == cors_of(without) == {}


async def test_all_pages_may_call_where_all_are_allowed() -> None:
    async with running_gateway(config=ALL) as world:
        assert (await preflight(world, "/v1/models", OTHER)).headers["access-control-allow-origin"] == "*"
        assert (await world.client.get("/v1/models", headers={"origin": OTHER})).headers[
            "access-control-allow-origin"
        ] == "*"


async def test_metrics_are_for_no_page() -> None:
    async with running_gateway(config=ALL) as world:
        assert cors_of(await world.client.get("/metrics", headers={"origin": PAGE})) == {}
        assert (await preflight(world, "/metrics")).status_code == 405


def test_only_names_of_headers_are_allowed_back() -> None:
    for asked in (b"a\r\nx: y", b"a" * 3000, b"\xff", b""):
        assert b"access-control-allow-headers" not in dict(preflight_headers(["GET"], asked))
    assert dict(preflight_headers(["GET", "HEAD"], b"X-A, x-b"))[b"access-control-allow-headers"] == b"X-A, x-b"


def test_an_origin_is_allowed_as_a_whole() -> None:
    cors = Cors([PAGE])

    assert cors.allows(PAGE.encode())
    for origin in (
        None,
        b"",
        b"null",
        PAGE.encode() + b".evil.com",
        PAGE.encode() + b":8443",
        b"http://app.example.com",
    ):
        assert not cors.allows(origin)
        assert cors.headers(origin) == ()
