"""Finding the server under test."""

import asyncio
import json
import socket
import time
from collections.abc import Callable

import pytest
import uvloop
from rich.pretty import pretty_repr

from penstock_loadtest.client.client import Client, Clock
from penstock_loadtest.client.target import MAX_PAGE_BYTES, Target, find_target
from penstock_loadtest.errors import TargetUnreachable
from tests.unit.loadtest.raw_server import ReceivedRequest, Script, Site, Wire, response, site

MODELS = json.dumps(
    {"object": "list", "data": [{"id": "one", "exact": True, "owned_by": "us"}, {"id": "two"}]}
).encode()


def serves(*parts: bytes, received: list[ReceivedRequest] | None = None) -> Script:
    async def script(wire: Wire) -> None:
        request = await wire.read_request()
        if received is not None:
            received.append(request)
        await wire.send(*parts)
        await wire.wait_closed()

    return script


def found(
    script: Script,
    url: Callable[[Site], str] = lambda there: there.url,
    *,
    keys: dict[str, str] | None = None,
    model: str | None = None,
) -> Target:
    async def main() -> Target:
        async with site(script) as there:
            target = await find_target(url(there), keys=keys or {}, model=model, timeout_s=20.0)
            assert target.url == there.url
            return target

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def sentence(script: Script, **options: object) -> str:
    """The sentence with which a target is refused, without the address that it begins with."""
    with pytest.raises(TargetUnreachable) as error:
        found(script, **options)  # type: ignore[arg-type]
    text = str(error.value)
    assert text.endswith((".", "?"))
    assert "\n" not in text
    return text.removeprefix("http://").removeprefix("127.0.0.1:").lstrip("0123456789")


def test_a_target_is_what_the_server_lists() -> None:
    received: list[ReceivedRequest] = []
    target = found(serves(response(MODELS), received=received), keys={"default": "sk-secret", "b": "sk-other"})

    assert (target.model, target.models, target.exact) == ("one", ["one", "two"], True)
    assert target.keys == {"default": "sk-secret", "b": "sk-other"}
    assert target.metrics_url == target.url.removesuffix("/v1") + "/metrics"
    assert received[0].line == "GET /v1/models HTTP/1.1"
    assert received[0].headers["authorization"] == "Bearer sk-secret"


def test_a_server_without_keys_is_asked_without_one() -> None:
    received: list[ReceivedRequest] = []
    found(serves(response(MODELS), received=received))

    assert "authorization" not in received[0].headers


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_goes_with_or_without_v1(end: str) -> None:
    assert found(serves(response(MODELS)), lambda there: there.url.removesuffix("/v1") + end).model == "one"


def test_a_model_can_be_named_and_may_not_say_whether_it_is_exact() -> None:
    target = found(serves(response(MODELS)), model="two")

    assert (target.model, target.exact) == ("two", None)


def test_keys_are_never_shown() -> None:
    target = found(serves(response(MODELS)), keys={"default": "sk-secret"})

    assert "secret" not in f"{target} {target!r} {[target]} {pretty_repr(target)}"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            response(b"{}", status="401 Unauthorized"),
            "/v1 refuses the API key (HTTP 401); it is taken from OPENAI_API_KEY, or from a tenant's key_env.",
        ),
        (
            response(b"{}", status="403 Forbidden"),
            "/v1 refuses the API key (HTTP 403); it is taken from OPENAI_API_KEY, or from a tenant's key_env.",
        ),
        (
            response(b"", status="404 Not Found"),
            "/v1/models answers HTTP 404; is this the base URL of an OpenAI-compatible API?",
        ),
        (
            response(b"<html>"),
            "/v1/models does not answer with a list of models; is this the base URL of an OpenAI-compatible API?",
        ),
        (
            response(b"\xff"),
            "/v1/models does not answer with a list of models; is this the base URL of an OpenAI-compatible API?",
        ),
        (
            response(b"[]"),
            "/v1/models does not answer with a list of models; is this the base URL of an OpenAI-compatible API?",
        ),
        (response(b"{}"), "/v1 serves no model."),
        (b"220 mail ready\r\n", " did not answer: what came is not HTTP/1.1."),
        (response(MODELS)[:-4] + b"", " did not answer within 0.3 s."),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_PAGE_BYTES + 1),
            f" sent a page of more than {MAX_PAGE_BYTES} bytes.",
        ),
    ],
    ids=["401", "403", "404", "html", "bytes", "list", "nothing", "mail", "half", "endless"],
)
def test_whatever_is_no_such_server_is_one_sentence(answer: bytes, said: str) -> None:
    async def main() -> str:
        async with site(serves(answer)) as there:
            with pytest.raises(TargetUnreachable) as error:
                await find_target(there.url, keys={"default": "sk-secret"}, timeout_s=0.3 if "0.3" in said else 20.0)
            return str(error.value).removeprefix("http://").removeprefix(f"127.0.0.1:{there.port}")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == said


def test_a_model_that_is_not_served_is_told_with_those_that_are() -> None:
    assert sentence(serves(response(MODELS)), model="three") == "/v1 does not serve three; it serves one, two."


@pytest.mark.parametrize("key", ["sk-x\n", "sk-ü", "sk-\x00"])
def test_a_key_that_no_header_can_hold_is_told_without_being_shown(key: str) -> None:
    said = sentence(serves(response(MODELS)), keys={"acme": key})

    assert said == "The API key of tenant acme can't be sent: it has a line break, or a character that is not ASCII."


@pytest.mark.parametrize("end", ["?api-version=1", "#models"])
def test_a_url_that_no_path_can_follow_is_refused(end: str) -> None:
    said = sentence(serves(response(MODELS)), url=lambda there: there.url + end)

    assert said == f"/v1{end} ends in a query or a fragment; the base URL is followed by /models and /chat/completions."


def test_a_server_that_is_not_there_fails_within_a_second() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # takes connections, and never answers
        before = time.monotonic()
        with pytest.raises(TargetUnreachable, match=r"^127\.0\.0\.1:\d+ did not answer within 1 s\.$"):
            asyncio.run(find_target(f"http://127.0.0.1:{silent.getsockname()[1]}", keys={}))
        took_s = time.monotonic() - before

    assert 0.9 < took_s < 5


async def test_a_client_gets_pages_of_its_server_and_of_others() -> None:
    received: list[ReceivedRequest] = []

    async with (
        site(serves(response(b"ours"), received=received)) as ours,
        site(serves(response(b"gone", status="410 Gone"), received=received)) as others,
    ):
        client = Client(Target(ours.url, "m", ["m"], {"default": "sk-secret"}, None, None), Clock())
        pages = [
            await client.get(url, 20.0) for url in ("/v1/models", f"{ours.url}?x=1", f"http://127.0.0.1:{others.port}")
        ]
        await client.close()

        assert pages == [(200, b"ours"), (200, b"ours"), (410, b"gone")]

    assert [request.line.split()[1] for request in received] == ["/v1/models", "/v1?x=1", "/"]
    assert ["authorization" in request.headers for request in received] == [True, False, False]
