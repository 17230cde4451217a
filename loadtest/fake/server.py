"""An OpenAI-compatible server whose latencies, shedding, stalls and faults are programmed; the truth of every request
is kept.

    python -m penstock_loadtest.fake.server --port 8001 --ttft-ms 50 --gap-ms 10 --config behaviour.yaml

The tester's own figures are checked against it, and a gateway can be measured in front of it. It serves chat and
completions, whole and as streams, /v1/models, /healthz and /metrics (`penstock_replicas`). Nothing is computed: prompts
count a token a word (ids as they are), answers are made-up words. What is due goes out on an absolute schedule, so
being late once does not make it late for good.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec
import typer
import uvloop

from penstock_loadtest.client.schedule import Schedule
from penstock_loadtest.errors import LoadtestError
from penstock_loadtest.fake.answer import Reply, make_frames, make_token_ids
from penstock_loadtest.fake.behaviour import Behaviour, load_behaviour
from penstock_loadtest.fake.connection import Connection, Request
from penstock_loadtest.fake.engine import LoadShedder, PrefixCache, Slots
from penstock_loadtest.fake.exchange import Exchange
from penstock_loadtest.fake.pages import Page, error_page, get_page, missing_model_page
from penstock_loadtest.fake.request import Body, BodyInvalid, read_body
from penstock_loadtest.fake.truth import (
    Truth,
    draw_answer_length,
    draw_fault,
    refuses_connections,
    shift_past_stalls,
    write_truth,
)
from penstock_loadtest.scenario import Lengths

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class FakeServer:
    """A server that listens from entering to leaving the context; a port of 0 is any free one.

    `truths` holds every request to an endpoint whose body could be read, in order of arrival, `metered` the tokens sent
    by tenant. With `on_truth` each truth is passed to it as its request ends instead, and not kept.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_truth: Callable[[Truth], None] | None = None,
    ) -> None:
        self.behaviour = behaviour
        self.truths: list[Truth] = []
        self.metered: Counter[str] = Counter()
        self.zero_s: float | None = None
        """Arrival of the first request, from which stalls and replicas over time count."""
        self._address = host, port
        self._on_truth = on_truth
        self._number = 0
        self._load_shedder = LoadShedder(behaviour.shedding)
        self._slots: Slots[Exchange] = Slots(behaviour.slots)
        blocks = behaviour.prefix_block_tokens
        self._prefixes = None if blocks is None else PrefixCache(blocks, behaviour.prefix_blocks)
        self._open: dict[Connection, Exchange | None] = {}
        self._all_closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._schedule = Schedule()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(lambda: Connection(self), *self._address, backlog=4096)
        except OSError:
            self._schedule.close()
            raise
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._all_closed.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            await self._all_closed.wait()
        await self._listener.wait_closed()
        self._schedule.close()

    def shift_due(self, due_s: float) -> float:
        """The time at which something due at `due_s` goes out: `due_s`, or the end of a stall."""
        if not self.behaviour.stalls or self.zero_s is None:
            return due_s
        return self.zero_s + shift_past_stalls(self.behaviour.stalls, due_s - self.zero_s)

    def on_opened(self, connection: Connection) -> None:
        self._open[connection] = None
        if self.zero_s is not None and refuses_connections(self.behaviour.stalls, time.perf_counter() - self.zero_s):
            connection.abort()

    def on_closed(self, connection: Connection) -> None:
        exchange = self._open.pop(connection)
        if exchange is not None:
            exchange.truth.outcome = "gone"
            self._leave(exchange, time.perf_counter())
        if not self._open:
            self._all_closed.set()

    def on_request(self, connection: Connection, request: Request) -> None:
        endpoint = ENDPOINTS.get(request.path) if request.method == "POST" else None
        if request.path.startswith("/v1/") and self.behaviour.keys and request.key not in self.behaviour.keys:
            self._respond(connection, request, error_page(401, "The API key is missing or unknown.", "invalid_api_key"))
        elif endpoint is not None:
            self._complete(connection, request, endpoint)
        else:
            since_s = 0.0 if self.zero_s is None else request.arrival_s - self.zero_s
            page = get_page(self.behaviour, request.path, since_s) if request.method == "GET" else None
            self._respond(
                connection,
                request,
                page or error_page(404, f"There is no {request.method} {request.path}.", "not_found"),
            )

    def _complete(self, connection: Connection, request: Request, endpoint: str) -> None:
        try:
            body = read_body(request.body, endpoint, self.behaviour.refused_fields)
        except BodyInvalid as error:
            self._respond(connection, request, error_page(400, str(error)))
            return
        if body.model not in self.behaviour.models:
            self._respond(connection, request, missing_model_page(body.model))
            return
        if self.zero_s is None:
            self.zero_s = request.arrival_s
        truth = self._new_truth(request, body, endpoint)
        retry_after_s = self._load_shedder.retry_after_s(request.arrival_s, self._slots.serving + self._slots.waiting)
        if retry_after_s is None:
            self._serve(connection, request, body, truth)
        else:
            self._shed(connection, request, truth, retry_after_s)

    def _new_truth(self, request: Request, body: Body, endpoint: str) -> Truth:
        number, behaviour = self._number, self.behaviour
        self._number += 1
        key = number
        if behaviour.drawn_by == "prompt":
            key = int.from_bytes(body.digest()[:7], "big")
        elif behaviour.drawn_by == "seed" and body.seed is not None:
            key = body.seed
        truth = Truth(
            number=number,
            request_id=f"fake-{number}",
            key=key,
            tenant=behaviour.keys.get(request.key, "default"),
            model=body.model,
            endpoint=endpoint,
            stream=bool(body.stream),
            arrival_s=request.arrival_s,
        )
        if self._on_truth is None:
            self.truths.append(truth)
        return truth

    def _shed(self, connection: Connection, request: Request, truth: Truth, retry_after_s: int) -> None:
        assert self.behaviour.shedding is not None
        truth.outcome, truth.status = "shed", self.behaviour.shedding.status
        truth.end_s = self.shift_due(request.arrival_s)
        code = "rate_limit_exceeded" if truth.status == 429 else "overloaded"
        headers = f"{_make_id_headers(truth)}retry-after: {retry_after_s}\r\n"
        self._respond(
            connection,
            request,
            error_page(truth.status, "The fake server declines this request, as it was told to.", code, headers),
        )
        self._report_truth(truth)

    def _serve(self, connection: Connection, request: Request, body: Body, truth: Truth) -> None:
        behaviour = self.behaviour
        self._count_prompt(body, truth)
        max_tokens = body.max_completion_tokens or body.max_tokens or behaviour.default_max_tokens
        truth.tokens = draw_answer_length(behaviour, truth.key, max_tokens=max_tokens, ignore_eos=bool(body.ignore_eos))
        fault = draw_fault(behaviour, truth.number, stream=truth.stream)
        truth.fault = None if fault is None else fault.kind
        truth.status = 500 if truth.fault == "status_500" else 200
        chunks = truth.chunks(behaviour)
        headers = (
            _make_id_headers(truth)
            + (_make_receipt(behaviour, truth, chunks[0].offset_s) if behaviour.receipt else "")
            + _make_closing_header(request)
        )
        reply = self._reply(body, truth, "length" if truth.tokens == max_tokens else "stop", headers)
        script = make_frames(reply, chunks, fault, stream=truth.stream, early_headers=behaviour.early_headers)
        exchange = Exchange(
            connection, truth, script, schedule=self._schedule, shift_due=self.shift_due, on_ended=self._on_ended
        )
        self._open[connection] = exchange
        if self._slots.enter(exchange):
            exchange.begin(truth.arrival_s)

    def _count_prompt(self, body: Body, truth: Truth) -> None:
        prompt = body.tokens()
        truth.prompt_tokens = len(prompt)
        if self._prefixes is None:
            truth.cached_tokens = min(self.behaviour.cached_tokens, len(prompt))
        else:
            truth.cached_tokens = self._prefixes.cached_tokens(f"{truth.tenant}\0{truth.model}", prompt)

    def _reply(self, body: Body, truth: Truth, finish_reason: str, headers: str) -> Reply:
        behaviour = self.behaviour
        digest = body.digest() + (truth.request_id.encode() if truth.fault == "different_answer" else b"")
        return Reply(
            answer_id=f"{'chatcmpl' if truth.endpoint == 'chat' else 'cmpl'}-{truth.request_id}",
            created=int(time.time()),
            model=truth.model,
            is_chat=truth.endpoint == "chat",
            token_ids=make_token_ids(digest, truth.tokens),
            finish_reason=finish_reason,
            prompt_tokens=truth.prompt_tokens,
            cached_tokens=truth.cached_tokens,
            has_usage=behaviour.usage and (body.include_usage or not truth.stream),
            has_token_ids=behaviour.token_ids and bool(body.return_token_ids),
            headers=headers,
        )

    def _on_ended(self, exchange: Exchange, due_s: float) -> None:
        """Conclude an exchange whose last byte, due at `due_s`, is sent."""
        truth = exchange.truth
        truth.outcome = "finished" if truth.status == 200 and truth.sent_tokens >= truth.tokens else "failed"
        self._open[exchange.connection] = None
        self._leave(exchange, due_s)

    def _leave(self, exchange: Exchange, at_s: float) -> None:
        """Conclude an exchange; the one that waits longest begins at that time, or when it came: after a stall requests
        are read before what was due earlier is sent."""
        truth = exchange.truth
        exchange.cut()
        truth.end_s = at_s
        self.metered[truth.tenant] += truth.sent_tokens
        if truth.start_s is None:
            self._slots.give_up(exchange)
        elif (following := self._slots.leave()) is not None:
            following.begin(max(at_s, following.truth.arrival_s))
        self._report_truth(truth)

    def _report_truth(self, truth: Truth) -> None:
        if self._on_truth is not None:
            self._on_truth(truth)

    def _respond(self, connection: Connection, request: Request, page: Page) -> None:
        """Send a page at once, or at the end of a stall."""

        def send(_now_s: float) -> None:
            connection.write(page._replace(headers=page.headers + _make_closing_header(request)).encode())
            connection.finish_answer()

        due_s = self.shift_due(request.arrival_s)
        if due_s > request.arrival_s:
            self._schedule.at(due_s, send)
        else:
            send(due_s)


def _make_id_headers(truth: Truth) -> str:
    return f"x-request-id: {truth.request_id}\r\nx-penstock-request-id: {truth.request_id}\r\n"


def _make_closing_header(request: Request) -> str:
    return "connection: close\r\n" if request.is_last else ""


def _make_receipt(behaviour: Behaviour, truth: Truth, ttft_s: float) -> str:
    replica = behaviour.replica_names[truth.number % len(behaviour.replica_names)]
    return (
        f"x-penstock-tier: {behaviour.tier}\r\nx-penstock-tier-reason: only tier\r\nx-penstock-replica: {replica}\r\n"
        f"x-penstock-cached-tokens: {truth.cached_tokens}\r\nx-penstock-predicted-ttft-ms: {1e3 * ttft_s:.3f}\r\n"
    )


def fake_server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one, printed as part of the URL.")] = 0,
    config: Annotated[
        Path | None, typer.Option(help="YAML of the behaviour; its keys are those of penstock_loadtest.fake.behaviour.")
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Time to first token.")] = None,
    gap_ms: Annotated[float | None, typer.Option(help="Time between tokens.")] = None,
    tokens_per_chunk: Annotated[int | None, typer.Option(help="Tokens in every chunk of a stream.")] = None,
    slots: Annotated[int | None, typer.Option(help="Requests served at once; the others wait.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Name of a model it serves; may be repeated.")] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="API key it accepts; may be repeated. None: no key is asked for.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="JSON lines: what each request was told to do and what became of it.")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API with programmed latencies and faults, until Ctrl-C."""
    changes: dict[str, object] = {
        "ttft_s": None if ttft_ms is None else Lengths(constant=ttft_ms / 1e3),
        "gap_s": None if gap_ms is None else Lengths(constant=gap_ms / 1e3),
        "tokens_per_chunk": None if tokens_per_chunk is None else Lengths(constant=tokens_per_chunk),
        "slots": slots,
        "models": model or None,
        "keys": {name: f"tenant-{number}" for number, name in enumerate(key)} if key else None,
    }
    behaviour = Behaviour() if config is None else load_behaviour(config)
    behaviour = msgspec.structs.replace(
        behaviour, **{name: value for name, value in changes.items() if value is not None}
    )
    try:
        uvloop.run(serve(behaviour, host, port, truth))
    except OSError as error:
        raise LoadtestError(
            f"The fake server can't listen on {host} port {port}, or can't write {truth}: {error.strerror or error}."
        ) from None


async def serve(behaviour: Behaviour, host: str, port: int, truth_path: Path | None) -> None:
    """Serve until SIGINT or SIGTERM; the base URL is the first line of standard output. Truths of requests still open
    are written at the end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with (truth_path or Path(os.devnull)).open("wb", buffering=1 << 16) as file:
        async with FakeServer(
            behaviour, host=host, port=port, on_truth=lambda truth: write_truth(file, truth)
        ) as server:
            typer.echo(server.url)
            await stop.wait()


if __name__ == "__main__":
    try:
        typer.run(fake_server)
    except LoadtestError as error:
        raise SystemExit(str(error)) from None
