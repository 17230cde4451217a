"""Tokens that are looked up and written without asking leave as those for which everybody is asked."""

from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.completions.completion import Choice, DeltaListener
from penstock.router.completions.formats import ChatFormat, ResponseMeta
from penstock.router.completions.sse import EventStream
from penstock.router.completions.text_assembly import TextAssembler
from penstock.router.routing.request import Generation
from penstock.router.transport.connection import EXTENSION
from penstock.router.transport.exchange import Exchange
from penstock.wire.frames import Delta, SamplingParams
from tests.unit.router.http_fakes import IM_END, TOKENIZER

Scope = dict[str, object]


class FakeConnection:
    """The connection of one exchange. is_direct: whether parts may be written without asking."""

    def __init__(self, *, is_direct: bool) -> None:
        self.written: list[bytes] = []
        self.num_asked = 0
        self.is_reading = True
        self._is_direct = is_direct
        self._on_close: set[Callable[[], None]] = set()

    def write_part(self, _scope: Scope, data: bytes) -> bool:
        assert self.is_reading
        self.num_asked += 1
        self.written.append(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def open_parts(self, _scope: Scope, on_close: Callable[[], None]) -> Callable[[bytes], None] | None:
        if not self._is_direct or not self.is_reading:
            return None
        self._on_close.add(on_close)
        return self._write

    def _write(self, data: bytes) -> None:
        assert self.is_reading
        self.written.append(data)

    def close(self) -> None:
        """Tell those who write that they must ask again: the peer stops reading, or is gone."""
        for on_close in self._on_close:
            on_close()
        self._on_close.clear()


class Subject:
    """A listener of one choice on such a connection."""

    def __init__(self, *, is_direct: bool) -> None:
        self.connection = FakeConnection(is_direct=is_direct)
        self.now_s = 0.0
        scope = {"method": "POST", "path": "/", "headers": [], "extensions": {EXTENSION: self.connection}}

        async def nothing(*_: object) -> None:
            raise AssertionError("nothing is awaited")

        self.exchange = Exchange(scope, nothing, nothing, "r", 0.0)  # type: ignore[arg-type]
        answer_format = ChatFormat(ResponseMeta("chatcmpl-r", 0, "tiny", "fp_", TOKENIZER, has_usage_chunk=True))
        generation = Generation("r", (), b"", 1, SamplingParams(1), "tenant-1", b"salt", 0.0)
        self.choice = Choice(0, generation, TextAssembler(TOKENIZER))
        listener = EventStream(self.exchange, answer_format, 1).listener(self.choice, lambda: self.now_s)
        assert listener is not None
        self.take: DeltaListener = listener

    @property
    def text(self) -> str:
        parts = [part.split(b"\r\n")[1] for part in self.connection.written]
        chunks = [msgspec.json.decode(part.removeprefix(b"data: ")) for part in parts]
        return "".join([chunk["choices"][0]["delta"]["content"] for chunk in chunks])


TOKENS = st.lists(st.one_of(st.sampled_from([*'a"\\\n\x01é👋'.encode(), IM_END]), st.integers(0, 255)), max_size=4)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.one_of(TOKENS, st.none()), max_size=30))
def test_the_bytes_the_counts_and_the_times_are_those_of_the_path_that_asks(steps: list[list[int] | None]) -> None:
    direct, asking = Subject(is_direct=True), Subject(is_direct=False)

    for number, token_ids in enumerate(steps):
        for subject in (direct, asking):
            subject.now_s = number
            if token_ids is None:
                subject.connection.close()
            else:
                assert subject.take(Delta(1, token_ids))

    assert direct.connection.written == asking.connection.written
    assert direct.choice.num_tokens == asking.choice.num_tokens
    assert direct.choice.last_token_s == asking.choice.last_token_s
    assert direct.choice.assembler.push(Delta(1, [0xE9])) == asking.choice.assembler.push(Delta(1, [0xE9]))


def test_after_the_first_token_nobody_is_asked_until_a_character_is_incomplete() -> None:
    subject = Subject(is_direct=True)

    for byte in b"abc":
        subject.take(Delta(1, [byte]))
    assert subject.connection.num_asked == 1
    for byte in "é".encode():
        subject.take(Delta(1, [byte]))
    assert subject.connection.num_asked == 2
    for byte in b"def":
        subject.take(Delta(1, [byte]))

    assert subject.connection.num_asked == 2
    assert subject.text == "abcédef"


def test_a_client_that_stops_reading_gets_nothing_past_the_reader_and_one_that_goes_on_does() -> None:
    subject = Subject(is_direct=True)
    for byte in b"ab":
        subject.take(Delta(1, [byte]))

    subject.connection.close()
    subject.connection.is_reading = subject.exchange.is_writable = False
    assert not subject.take(Delta(1, [ord("c")]))
    assert subject.choice.num_tokens == 2
    subject.connection.is_reading = subject.exchange.is_writable = True
    for byte in b"cd":
        assert subject.take(Delta(1, [byte]))

    assert subject.text == "abcd"
    assert subject.connection.num_asked == 2
