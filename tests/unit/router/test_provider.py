"""Reading a provider's stream; calls as a whole are in test_dispatch_tiers, against a real server."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router import provider
from penstock.router.provider_api import StreamBroken

STREAM = 'data: {"a":"\u2028 and \x85"}\r\n\r\n: a comment\nevent: x\ndata:{"b":"é"}\n\ndata: [DONE]\n\ndata: last'.encode()
EVENTS = ['{"a":"\u2028 and \x85"}'.encode(), '{"b":"é"}'.encode(), b"[DONE]", b"last"]


def events(pieces: list[bytes]) -> list[bytes]:
    async def data() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def main() -> list[bytes]:
        return [event async for event in provider._events(data())]

    return asyncio.run(main())


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_events_are_the_same_however_the_bytes_are_cut(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(STREAM)]

    assert events([STREAM[begin:end] for begin, end in pairwise(cuts)]) == EVENTS


def test_an_event_without_end_is_not_collected_for_ever() -> None:
    with pytest.raises(StreamBroken):
        events([b"data: "] + [b"x" * 65536] * 20)
