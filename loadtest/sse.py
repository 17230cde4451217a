"""Server-sent events out of bytes as they come (WHATWG HTML, section 9.2): the data of every event, whole, in order. Pure."""

MAX_EVENT_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event is longer than MAX_EVENT_BYTES."""


class EventParser:
    """Feed it what arrives; lines may end with LF, CR or CRLF and be cut anywhere. Fields other than data are left out."""

    def __init__(self) -> None:
        self._rest = b""
        """A line that has no end yet, or whose CR may still get its LF."""
        self._data: list[bytes] = []
        """Of the event that is not over."""
        self._is_first = True

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end in it. Raises EventTooLong."""
        if not (self._rest or self._data or self._is_first) and data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n"):
            return [data[6:-2]] if b"\r" not in data else self._feed(data)
        return self._feed(data)

    def _feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        if self._is_first:
            if _BOM.startswith(data):  # too short to tell
                self._rest = data
                return []
            data = data.removeprefix(_BOM)
            self._is_first = False
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        self._rest = rest + held
        events = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLong(f"An event is longer than {MAX_EVENT_BYTES} bytes.")
        return events

    def _line(self, line: bytes) -> bytes | None:
        """The event that ends with this line."""
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        if line.startswith(b"data"):
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return None
