"""Names and addresses."""

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from penstock_loadtest.client.addresses import Addresses, is_address


async def test_an_address_is_never_resolved_nor_left_out() -> None:
    addresses = Addresses("127.0.0.1", 80)
    addresses.exclude("127.0.0.1")

    assert [await addresses.next() for _ in range(2)] == ["127.0.0.1"] * 2


async def test_a_name_leads_to_its_addresses() -> None:
    assert is_address(await Addresses("localhost", 80).next())


async def test_a_name_that_is_not_known_raises() -> None:
    with pytest.raises(socket.gaierror):
        await Addresses("x" * 64 + ".example", 80).next()


async def test_many_callers_at_once_share_one_resolution() -> None:
    addresses = Addresses("localhost", 80)
    askers = [asyncio.create_task(addresses.next()) for _ in range(8)]
    await asyncio.sleep(0)
    question = addresses._resolving
    found = await asyncio.gather(*askers)

    assert addresses._resolving is question
    assert set(found) <= {"127.0.0.1", "::1"}


async def test_one_who_gives_up_does_not_take_the_answer_from_the_others() -> None:
    addresses = Addresses("localhost", 80)
    impatient, patient = asyncio.create_task(addresses.next()), asyncio.create_task(addresses.next())
    await asyncio.sleep(0)
    impatient.cancel()

    assert is_address(await patient)


async def test_an_address_that_failed_is_left_out_while_there_are_others() -> None:
    addresses = Addresses("localhost", 80)
    addresses._known = ["10.0.0.1", "10.0.0.2"]
    addresses.exclude("10.0.0.1")
    addresses.exclude("10.0.0.1")

    assert not addresses.has_untried({"10.0.0.1", "10.0.0.2"})
    assert addresses.has_untried({"10.0.0.1"})
    assert [await addresses.next() for _ in range(2)] == ["10.0.0.2"] * 2


SLOW_NAME_SERVER = """
import asyncio, socket, time
from penstock_loadtest.client.connection import Connections, parse_origin
from penstock_loadtest.errors import TargetUnreachable
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
try:
    asyncio.run(Connections(parse_origin("http://somewhere:8000")).connect(0.1))
except TargetUnreachable as error:
    print(error)
"""


def test_a_name_server_that_does_not_answer_does_not_keep_the_command_from_ending() -> None:
    before = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SLOW_NAME_SERVER], capture_output=True, text=True, check=True, timeout=60
    )

    assert ended.stdout == "somewhere:8000 did not take the connection within 0.1 s.\n"
    assert time.monotonic() - before < 50
