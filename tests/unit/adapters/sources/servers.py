"""Servers on real sockets that say exactly what a test wants, byte by byte; archives of anything; names that mean what
a test says."""

import asyncio
import io
import tarfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.adapters.peft import FILES
from penstock.adapters.sources.connection import SystemNames
from penstock.base.tls import TlsContexts, TlsFiles
from tests.unit.adapters.files import write


@dataclass
class ReceivedRequest:
    """A request as a server has read it."""

    target: str
    headers: dict[str, str]
    """Values by name in lower case."""
    lines: list[str]
    """All of its head."""


@dataclass
class Server:
    port: int
    asked: list[ReceivedRequest] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has gone before it had its response."""

    @property
    def targets(self) -> list[str]:
        return [asked.target for asked in self.asked]


Handler = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes = b"", status: int = 200, length: int | None = None, **headers: str) -> bytes:
    """A response as it is sent. headers: with _ for -. length: what is declared; None: the truth."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def files_at(pages: Mapping[str, bytes]) -> Handler:
    """A server of files, by target; what a page is of is sent as it is where it begins with HTTP/."""

    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        page = pages.get(asked.target)
        if page is None:
            writer.write(response(status=404))
        else:
            writer.write(page if page.startswith(b"HTTP/") else response(page))

    return handle


@asynccontextmanager
async def serve(
    handle: Handler, tls: TlsFiles | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Server]:
    """One response a connection. A handler that goes on is ended with the server."""
    found: Server
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            asked = ReceivedRequest(
                head[0].split(" ")[1], {name.lower(): value for name, value in headers.items()}, head
            )
            found.asked.append(asked)
            found.was_asked.set()
            work, gone = asyncio.ensure_future(handle(asked, writer)), asyncio.ensure_future(reader.read())
            try:
                await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    found.client_left.set()
            finally:
                for part in (work, gone):
                    part.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    own = None if tls is None else msgspec.structs.replace(tls, ca=None)  # a server with CAs asks for a certificate
    context = None if own is None else TlsContexts(own, is_server=True).newest
    server = await asyncio.start_server(talk, host, port, ssl=context)
    found = Server(server.sockets[0].getsockname()[1])
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Names:
    """A resolver: a name means the next of its addresses at each look-up, and its last one for ever; what it does not
    know is the system's affair, if it is a number."""

    def __init__(self, **names: str | Sequence[Sequence[str]]) -> None:
        """names: with _ for a dot; addresses with spaces between them, or a list of such answers."""
        self._answers = {
            name.replace("_", "."): [found.split()] if isinstance(found, str) else [list(each) for each in found]
            for name, found in names.items()
        }
        self.looked_up: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        answers = self._answers.get(host)
        if answers is None:
            if host.strip("0123456789abcdefx.:"):
                raise OSError(f"no such name in this test: {host}")
            return await SystemNames()(host, port)
        return answers.pop(0) if len(answers) > 1 else answers[0]


def adapter_files(folder: Path, fill: int = 0) -> dict[str, bytes]:
    """The two files of an adapter, by name."""
    made = write(folder, fill=fill)
    return {name: (made / name).read_bytes() for name in FILES}


def below(base: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{base}/{name}": content for name, content in files.items()}


def tar_of(files: Mapping[str, bytes], mode: str = "w:gz", form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1.5  # which no plain header can hold
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_of(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()
