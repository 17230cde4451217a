"""Server-sent events out of bytes as they come (WHATWG HTML, section 9.2): the data of every event, whole, in order.
Pure."""

MAX_EVENT_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_LF, _CR = b"\n\r"


class EventTooLong(Exception):
    """An event is longer than MAX_EVENT_BYTES."""


class EventParser:
    """Parser that is fed what arrives; lines may end with LF, CR or CRLF and be cut anywhere. Fields other than data
    are left out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """A line that has no end yet."""
        self._data: list[bytes] = []
        """Values of the `data` lines of the event that is not over."""
        self._data_bytes = 0
        self._has_begun = False
        self._skips_lf = False
        """The last byte was a CR: an LF that follows belongs to it."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end in it. Raises EventTooLong."""
        # one whole event, of a line, is what nearly every packet of a stream is (an int is found faster than a byte
        # string)
        if (
            data[:6] == b"data: "
            and data.find(b"\n") == len(data) - 2
            and data[-1] == _LF
            and _CR not in data
            and not (self._rest or self._data)
        ):
            self._has_begun, self._skips_lf = True, False
            return [data[6:-2]]
        if not self._has_begun:
            data = bytes(self._rest) + data
            if _BOM.startswith(data):  # too short to know
                self._rest = bytearray(data)
                return []
            data = data.removeprefix(_BOM)
            self._rest.clear()
            self._has_begun = True
        events = self._feed(data)
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def _feed(self, data: bytes) -> list[bytes]:
        if self._skips_lf and data:
            data = data.removeprefix(b"\n")
            self._skips_lf = False
        if _CR in data:
            self._skips_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if _LF not in data:
            self._rest += data
            return []
        *lines, rest = (bytes(self._rest) + data).split(b"\n")
        self._rest = bytearray(rest)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        """The event that ends with this line."""
        if not line:
            data, self._data, self._data_bytes = self._data, [], 0
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1
        return None
