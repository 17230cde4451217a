"""A light closed-loop client for streaming chats on loopback: what it costs itself must not drown what it measures.

One keep-alive connection a stream, HTTP parsed by httptools, TCP_NODELAY and immediate acknowledgements. The time of
every piece of the answer is kept; bodies are looked at only after the run.
"""

import asyncio
import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

WORDS = [
    "the", "and", "for", "are", "but", "not", "you", "all", "any", "can", "had", "her", "was", "one", "our", "out",
    "day", "get", "has", "him", "how", "man", "new", "now", "old", "see", "two", "way", "who", "boy", "did", "its",
    "let", "put",
]  # fmt: skip


@dataclass(slots=True)
class Answer:
    """One streamed answer. Times in seconds from the moment the request was written."""

    status: int
    arrivals: list[float]
    """Arrival of each content event, in order; events that came in one piece share their time."""
    total_s: float
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    began_s: float = 0.0
    """Moment at which the request was written, by time.perf_counter."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


class _Connection(asyncio.Protocol):
    def __init__(self, port: int) -> None:
        self.port = port
        self.transport: asyncio.Transport | None = None
        self.future: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.socket = transport.get_extra_info("socket")
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.future and not self.future.done():
            self.future.set_exception(ConnectionError(f"the connection was lost: {exc}"))

    async def post(self, request: bytes) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.headers: dict[str, str] = {}
        self.parser = httptools.HttpResponseParser(self)
        self.future = asyncio.get_running_loop().create_future()
        if self.transport is None:
            raise ConnectionError("the connection was lost before the request")
        self.began = time.perf_counter()
        self.transport.write(request)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        await self.future

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter() - self.began
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self.now, body))

    def on_message_complete(self) -> None:
        if self.future and not self.future.done():
            self.future.set_result(None)


def _answer(connection: _Connection) -> Answer:
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    rest = b""
    for at, piece in connection.pieces:
        rest += piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            usage = event.get("usage") or usage
            if any((c.get("delta") or {}).get("content") for c in event.get("choices") or ()):
                arrivals.append(at)
    return Answer(
        connection.parser.get_status_code(), arrivals, connection.now, usage, connection.headers, connection.began
    )


class ChatClient:
    """Streams chats from one OpenAI-compatible base URL (without /v1), or from several: each new connection then goes
    to one of them at random, as a Service of Kubernetes places it."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "",
        *,
        extra: dict[str, Any] | None = None,
        others: Sequence[str] = (),
        rng: random.Random | None = None,
    ) -> None:
        """others: further base URLs. rng: by which a new connection's is chosen."""
        parts = urlsplit(url)
        self.addresses = [(each.hostname or "127.0.0.1", each.port or 80) for each in map(urlsplit, (url, *others))]
        self.rng = rng or random.Random(0)
        self.num_answers: Counter[int] = Counter()
        """Answers by the port that gave them."""
        self.model, self.extra = model, extra or {}
        auth = f"Authorization: Bearer {key}\r\n" if key else ""
        self.head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\n{auth}Content-Length: "
        )
        self.idle: list[_Connection] = []

    async def chat(self, content: str, max_tokens: int, *, system: str | None = None, timeout_s: float = 120) -> Answer:
        """One streamed chat with a single user message. Raises RuntimeError unless it ends with status 200 and
        content."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        body = msgspec.json.encode(
            {
                "model": self.model,
                "messages": [*messages, {"role": "user", "content": content}],
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra,
            }
        )
        connection = await self._connection()
        try:
            await asyncio.wait_for(connection.post(f"{self.head}{len(body)}\r\n\r\n".encode() + body), timeout_s)
        except BaseException:
            connection.close()
            raise
        self.num_answers[connection.port] += 1
        if connection.headers.get("connection") == "close":
            connection.close()
        else:
            self.idle.append(connection)
        answer = _answer(connection)
        if answer.status != 200 or not answer.arrivals:
            raise RuntimeError(f"status {answer.status}: {b''.join(p for _, p in connection.pieces)[:300]!r}")
        return answer

    async def _connection(self) -> _Connection:
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None:
                return connection
        host, port = self.rng.choice(self.addresses)
        _, connection = await asyncio.get_running_loop().create_connection(lambda: _Connection(port), host, port)
        return connection

    def close(self) -> None:
        for connection in self.idle:
            if connection.transport is not None:
                connection.transport.close()
        self.idle.clear()


def prompt(rng: random.Random, tokens: int) -> str:
    """Common words of roughly `tokens` tokens, new from the first word on."""
    return " ".join([f"{rng.getrandbits(32):x}", *rng.choices(WORDS, k=max(1, tokens - 8))])


async def closed_loop(
    client: ChatClient,
    *,
    streams: int,
    requests: int,
    prompt_tokens: int,
    max_tokens: int,
    seed: int,
    earlier_tokens: int = 0,
) -> list[Answer]:
    """`requests` chats, `streams` at a time, each stream starting its next when one ends. earlier_tokens: of a turn
    before each prompt, which is the same for a stream's number whatever the seed."""
    rng = random.Random(seed)
    prompts = iter([prompt(rng, prompt_tokens) for _ in range(requests)])
    answers: list[Answer] = []

    async def stream(number: int) -> None:
        await asyncio.sleep(number * 0.01)  # no thundering start
        earlier = prompt(random.Random(number), earlier_tokens) if earlier_tokens else None
        for content in prompts:
            answers.append(await client.chat(content, max_tokens, system=earlier))

    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(stream(number))
    return answers
