"""Ports of loopback for servers that start a little later.

A port that the kernel gives (bind to 0) is one of those that it gives every outgoing connection too, and with a load on
the machine it often is one by the time the server listens. These lie below the kernel's range (32768 and up by default
on Linux), above the ports of Ray's workers (10002 to 19999) and below those of Kubernetes' node ports.
"""

import random
import socket

FIRST, LAST = 20000, 29999
BUS = 10000
"""A node of a Redis cluster talks to the others on the port this much above its own."""
LAST_WITH_BUS = 22767

_given: set[int] = set()


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int, *, with_bus: bool = False) -> list[int]:
    """Ports that nobody listens on now, none of them given before; with_bus: nor on the one of a cluster's bus."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(FIRST, LAST_WITH_BUS if with_bus else LAST)
        wanted = (port, port + BUS) if with_bus else (port,)
        if port not in _given and all(_is_free(each) for each in wanted):
            _given.add(port)
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
