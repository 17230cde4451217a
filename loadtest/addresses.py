"""Where a host's name leads: resolved once, not with every connection, so that a burst of connections does not wait for a name server."""

import asyncio
import ipaddress
import socket
import threading


class Addresses:
    """The addresses of a host. Connections go to them in turn, as they would if each asked for the name anew; one that failed is left out until none is left."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[str] = [host] if is_address(host) else []
        self._asking: asyncio.Future[list[str]] | None = None

    async def next(self) -> str:
        """The address whose turn it is. Raises OSError (socket.gaierror: the name is not known)."""
        if not self._known:
            if self._asking is None or self._asking.done():
                self._asking = resolved(self._host, self._port)
            self._known = list(await asyncio.shield(self._asking))
        address = self._known.pop(0)
        self._known.append(address)
        return address

    def failed(self, address: str) -> bool:
        """Leave it out. True: others are left to try."""
        if address in self._known and not is_address(self._host):
            self._known.remove(address)
            return bool(self._known)
        return False


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolved(host: str, port: int) -> asyncio.Future[list[str]]:
    """Ask for the name in a thread that nobody waits for at exit: a name server that does not answer must not keep the command from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()
    threading.Thread(target=_ask, args=(host, port, loop, answer), daemon=True).start()
    return answer


def _ask(host: str, port: int, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[list[str]]) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(place[4][0]) for place in found))
        _tell(loop, lambda: answer.done() or answer.set_result(addresses))
    except (OSError, UnicodeError) as error:
        failure = error if isinstance(error, OSError) else socket.gaierror(str(error))
        _tell(loop, lambda: answer.done() or answer.set_exception(failure))


def _tell(loop, what) -> None: ...
