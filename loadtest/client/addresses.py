"""The addresses that a host's name stands for, resolved once and not with every connection, so that a burst of
connections does not wait for a name server."""

import asyncio
import ipaddress
import socket
import threading
from contextlib import suppress


class Addresses:
    """The addresses of a host. Connections go to them in turn, as if each resolved the name anew; an address that
    failed is left out until none is left, and then the name is resolved again."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[str] = [host] if is_address(host) else []
        self._resolving: asyncio.Future[list[str]] | None = None

    async def next(self) -> str:
        """The address whose turn it is. Raises OSError (socket.gaierror: the name is not known)."""
        if not self._known:
            if self._resolving is None or self._resolving.done():
                self._resolving = resolve(self._host, self._port)
            self._known = list(await asyncio.shield(self._resolving))
        address = self._known.pop(0)
        self._known.append(address)
        return address

    @property
    def count(self) -> int:
        return len(self._known)

    def exclude(self, address: str) -> None:
        """Leave an address out of the turn, because a connection to it failed."""
        if address in self._known and not is_address(self._host):
            self._known.remove(address)

    def has_untried(self, tried: set[str]) -> bool:
        """Whether an address is known that is not among `tried`."""
        return not tried.issuperset(self._known)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, port: int) -> asyncio.Future[list[str]]:
    """Resolve the name in a thread that nobody waits for at exit: a name server that does not answer must not keep the
    command from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()
    threading.Thread(target=_resolve_in_thread, args=(host, port, loop, answer), daemon=True).start()
    return answer


def _resolve_in_thread(
    host: str, port: int, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[list[str]]
) -> None:
    found: list[str] | OSError
    try:
        found = list(
            dict.fromkeys(str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        )
    except UnicodeError:
        found = socket.gaierror("no name can look like this")
    except OSError as error:
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, answer, found)


def _settle(answer: asyncio.Future[list[str]], found: list[str] | OSError) -> None:
    if answer.done():
        return
    if isinstance(found, OSError):
        answer.set_exception(found)
        answer.exception()  # the caller may have given up, and that is no mistake
    else:
        answer.set_result(found)
