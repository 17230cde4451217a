"""What attacks of bench.hostile are made of: connections that send whatever they like, a tally of what came back, and a
bound on the attacker's own CPU, since it shares cores with what it attacks."""

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec

CPU_SHARE = 0.4
"""Most of one core that the attacker takes."""
CPU_BURST_S = 0.2
"""CPU seconds that it may spend at once."""
ADDRESS = "127.0.0.9"
"""Address that attackers come from; innocents have another one."""
READ_BYTES = 2**16
CONNECT_S = 5.0
PAUSE_S = 0.05
"""Pause before a connection that was lost or refused is made again, seconds."""
OWN_KEY = ""
LEFT = "left"
"""Tally of connections that the attacker itself gave up at once: there was nothing to refuse."""


class Refused(Exception):
    """The connection was not made."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is attacked, with what, and for how long."""

    host: str
    port: int
    key: str
    model: str
    stream_ports: tuple[int, ...] = ()
    """Ports of the replicas' token streams."""
    seconds: float
    body_bytes: int = 8 * 2**20 - 4096
    """Size of the largest bodies."""
    scale: float = 1.0
    """Share of the connections and tasks of an attack that are used."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an attacker got."""

    tally: dict[str, int]
    """Number of requests or connections by what became of them: a status, `cut` (closed without an answer), `held`
    (open when the attack ended), `refused` (not connected). A stream that began counts twice, as 200 and by its
    end, unless it was read to its end."""
    cpu_s: float
    seconds: float


class Wire(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


class Attacker:
    """One attack's view of its target. `is_on` says whether it goes on."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tally: Counter[str] = Counter()
        self._began_s = time.monotonic()
        self._cpu_s = time.process_time()
        self._until_s = self._began_s + target.seconds

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def outcome(self) -> Outcome:
        return Outcome(
            tally=dict(self.tally),
            cpu_s=time.process_time() - self._cpu_s,
            seconds=time.monotonic() - self._began_s,
        )

    async def pace(self) -> None:
        """Wait until the CPU spent so far is within CPU_SHARE."""
        spent_s = time.process_time() - self._cpu_s
        ahead_s = spent_s - CPU_BURST_S - CPU_SHARE * (time.monotonic() - self._began_s)
        if ahead_s > 0:
            await asyncio.sleep(ahead_s / CPU_SHARE)

    async def many(self, count: int, work: Callable[[int], Awaitable[None]]) -> None:
        """Run `work` in so many tasks, each again and again, until the attack is over; what is under way then is
        `held`."""
        tasks = [asyncio.create_task(self._repeat(work, number)) for number in range(self.scaled(count))]
        _, pending = await asyncio.wait(tasks, timeout=self.left_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.tally["held"] += len(pending)

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.target.scale))

    async def _repeat(self, work: Callable[[int], Awaitable[None]], number: int) -> None:
        while self.is_on:
            await self.pace()
            try:
                await work(number)
            except Refused:
                self.tally["refused"] += 1
                await asyncio.sleep(PAUSE_S)
            except (OSError, EOFError, ValueError):
                self.tally["cut"] += 1
                await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def connection(
        self, *, port: int | None = None, address: str = ADDRESS, receive_bytes: int | None = None
    ) -> AsyncIterator[Wire]:
        """A connection, reset at the end. receive_bytes: size of its receive buffer. Raises Refused."""
        family = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        family.setblocking(False)
        if receive_bytes is not None:
            family.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        family.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            family.bind((address, 0))
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(family, (self.target.host, port or self.target.port))
                reader, writer = await asyncio.open_connection(sock=family, limit=READ_BYTES)
        except (OSError, TimeoutError) as error:
            family.close()
            raise Refused from error
        except BaseException:
            family.close()
            raise
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()

    def head(
        self, path: str, length: int | None, *, key: str | None = OWN_KEY, method: str = "POST", extra: str = ""
    ) -> bytes:
        """Head of a request. length: of its body; None: it has none. key: None sends none. extra: whole header
        lines."""
        sent_key = self.target.key if key == OWN_KEY else key
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.target.host}:{self.target.port}"]
        lines += [f"Authorization: Bearer {sent_key}"] if sent_key else []
        lines += ["Content-Type: application/json", f"Content-Length: {length}"] if length is not None else []
        return ("\r\n".join(lines) + f"\r\n{extra}\r\n").encode()

    async def status(self, wire: Wire) -> int:
        """The status of the next response, tallied; its head is read. Raises ConnectionError."""
        while True:
            line = await wire.reader.readline()
            if not line:
                raise ConnectionError("closed without an answer")
            status = int(line.split()[1])
            while (await wire.reader.readline()).strip():
                pass
            if status != 100:
                self.tally[str(status)] += 1
                return status

    async def drain(self, wire: Wire) -> None:
        """Read until the other side closes."""
        while await wire.reader.read(READ_BYTES):
            await self.pace()

    async def post(self, path: str, body: bytes, *, key: str | None = OWN_KEY, extra: str = "") -> None:
        """One request on a connection of its own, and all of its answer."""
        async with self.connection() as wire:
            await wire.send(self.head(path, len(body), key=key, extra="Connection: close\r\n" + extra) + body)
            if await self.status(wire) == HTTPStatus.OK:
                await self.drain(wire)

    async def flood(self, path: str, body: bytes, tasks: int, *, key: str | None = OWN_KEY, extra: str = "") -> None:
        """The same request again and again, so many at a time."""
        await self.many(tasks, lambda _: self.post(path, body, key=key, extra=extra))
