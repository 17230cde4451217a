"""What is on Redis's disk: of a played server that knows WAITAOF, and of a real one that does not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.base.redis import connect
from penstock.base.redis_disk import ATTEMPTS, find_disk_doubt
from penstock.base.redis_roles import ROLES
from penstock.base.redis_server import EmbeddedRedis, find_executable

NOT_ALLOWED = b"-NOPERM this user has no permissions to run this command\r\n"
OLD = b"-ERR unknown command 'WAITAOF', with args beginning with: '1' '0' '1000'\r\n"


class PlayedRedis:
    """Says what it is told to: replies by command; one that is an event is given when that is set."""

    def __init__(self, **replies: bytes) -> None:
        self.replies = {"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n", **replies}
        self.asked: list[str] = []
        self.waits: list[tuple[int, list[str]]] = []
        """Number of the connection of each WAITAOF, and what had been sent on it before."""
        self.has_waited = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number, sent = self._num_connections, list[str]()
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2].decode())
                name = words[0].upper()
                if name == "WAITAOF":
                    self.waits.append((number, list(sent)))
                    self.has_waited.set()
                    await self.gate.wait()
                sent.append(name)
                self.asked.append(" ".join(words[:3]))
                writer.write(self.replies.get(f"{name}_{words[-1]}", self.replies.get(name, b"+OK\r\n")))
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def played(server: PlayedRedis, folder: Path) -> AsyncIterator[str]:
    listening = await asyncio.start_unix_server(server.serve, folder / "s")
    async with listening:
        yield f"unix://{folder}/s"


def setting(name: str, value: str) -> bytes:
    return b"%1\r\n" + b"".join(f"${len(each)}\r\n{each}\r\n".encode() for each in (name, value))


def settings(appendonly: str, appendfsync: str) -> dict[str, bytes]:
    return {
        "CONFIG_appendonly": setting("appendonly", appendonly),
        "CONFIG_appendfsync": setting("appendfsync", appendfsync),
    }


def info(aof_enabled: str) -> bytes:
    text = f"# Persistence\r\nloading:0\r\naof_enabled:{aof_enabled}\r\n"
    return f"${len(text)}\r\n{text}\r\n".encode()


async def doubt_of(server: PlayedRedis, folder: Path) -> str | None:
    async with played(server, folder) as url, connect(url) as client:
        return await find_disk_doubt(client)


async def test_what_was_written_is_waited_for_on_the_connection_that_wrote(socket_dir: Path) -> None:
    server = PlayedRedis(WAITAOF=b"*2\r\n:1\r\n:0\r\n")
    server.gate.clear()
    asking = asyncio.create_task(doubt_of(server, socket_dir))
    waiting = asyncio.create_task(server.has_waited.wait())
    await asyncio.wait([asking, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not asking.done(), "the disk has not answered"
    server.gate.set()

    assert await asking is None
    assert [sent[-1] for _, sent in server.waits] == ["SET"]


async def test_a_disk_that_does_not_answer_is_asked_again_and_then_said(socket_dir: Path) -> None:
    server = PlayedRedis(WAITAOF=b"*2\r\n:0\r\n:0\r\n")

    doubt = await doubt_of(server, socket_dir)

    assert doubt is not None
    assert "has not written to its disk for 5 s" in doubt
    assert len(server.waits) == ATTEMPTS


async def test_a_server_without_an_append_only_file_says_so(socket_dir: Path) -> None:
    refusal = b"-ERR WAITAOF cannot be used when numlocal is set but appendonly is disabled.\r\n"

    doubt = await doubt_of(PlayedRedis(WAITAOF=refusal), socket_dir)

    assert doubt is not None
    assert "appendonly is disabled" in doubt


@pytest.mark.parametrize(
    ("replies", "sentence"),
    [
        (settings("yes", "always"), None),
        (settings("yes", "everysec"), "appendfsync everysec"),
        (settings("no", "always"), "appendonly no"),
        ({"CONFIG": NOT_ALLOWED, "INFO": NOT_ALLOWED}, "is unknown"),
        ({"CONFIG": NOT_ALLOWED, "INFO": info("1")}, "does not show how often"),
        ({"CONFIG": NOT_ALLOWED, "INFO": info("0")}, "appendonly no"),
    ],
    ids=["always", "everysec", "no file", "not told", "a file, by a role's user", "no file, by a role's user"],
)
async def test_an_older_servers_settings_are_read_instead(
    replies: dict[str, bytes], sentence: str | None, socket_dir: Path
) -> None:
    doubt = await doubt_of(PlayedRedis(WAITAOF=OLD, **replies), socket_dir)

    assert (doubt is None) == (sentence is None)
    assert sentence is None or sentence in str(doubt)


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


async def test_the_embedded_server_writes_once_a_second_and_that_is_said(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        doubt = await find_disk_doubt(client)
        await client.config_set("appendfsync", "always")

        assert doubt is None or "appendfsync everysec" in doubt, "None: it knows WAITAOF"
        assert await find_disk_doubt(client) is None


async def test_an_operators_user_learns_what_the_server_shows_it(tmp_path: Path, socket_dir: Path) -> None:
    embedded = EmbeddedRedis(
        executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir, passwords=dict.fromkeys(ROLES, "word")
    )
    embedded.start()
    try:
        async with connect(embedded.url_for("operator")) as client:
            doubt = await find_disk_doubt(client)
    finally:
        embedded.stop()

    assert doubt is None or "does not show how often" in doubt, "None: it knows WAITAOF"
