"""Uploads as multipart/form-data (RFC 7578): the files go to a folder piece by piece, bounded, never whole in
memory."""

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.adapters.peft import FILES, refused_name
from penstock.wire.errors import InvalidRequest

MAX_BOUNDARY_BYTES = 70
WRITE_BYTES = 2**20
"""Bytes that are collected before a thread writes them."""
MAX_FIELD_BYTES = 4096
"""Longest value of a field, bytes; the headers of a part are bounded by the parser."""


class FormKind(NamedTuple):
    """What a form may hold."""

    fields: tuple[str, ...]
    files: tuple[str, ...]
    """Names under which its files are kept; each must come once."""
    place: Callable[[str], str]
    """The name under which a part with a file name is kept, one of `files`. Raises InvalidRequest."""


def _place_adapter(file_name: str) -> str:
    if file_name not in FILES:
        raise refused_name(file_name)
    return file_name


ADAPTER_FORM = FormKind(("name", "base_model"), FILES, _place_adapter)
TEXT = "text"
"""Name under which the file of a TEXT_FORM is kept."""
TEXT_FORM = FormKind(("purpose", "expires_after[anchor]", "expires_after[seconds]"), (TEXT,), lambda _: TEXT)
"""The form of POST /v1/files, as OpenAI's clients send it."""


class Received(NamedTuple):
    """A form whose files have been written."""

    fields: Mapping[str, str]
    file_names: Mapping[str, str]
    """Last part of each file's name as the form has it, by the name under which it is kept."""


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary in a Content-Type of multipart/form-data. Returns None if it is another type. Raises InvalidRequest
    if the boundary is missing or longer than 70 bytes (RFC 2046, 5.1.1)."""
    kind, options = parse_options_header(content_type)
    if kind.lower() != b"multipart/form-data":
        return None
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("The Content-Type multipart/form-data has no boundary.")
    if len(boundary) > MAX_BOUNDARY_BYTES:
        raise InvalidRequest(f"The form's boundary has more than {MAX_BOUNDARY_BYTES} bytes.")
    return boundary


async def receive(
    boundary: bytes, parts: AsyncIterable[bytes], folder: Path, kind: FormKind = ADAPTER_FORM
) -> Received:
    """Write the form's files to `folder`. Raises InvalidRequest, and what `parts` raises."""
    form = Form(boundary, folder, kind)
    held: list[bytes] = []
    num_held = 0
    try:
        async for part in parts:
            held.append(part)
            num_held += len(part)
            if num_held >= WRITE_BYTES:
                await asyncio.to_thread(form.feed, held)
                held, num_held = [], 0
        await asyncio.to_thread(form.feed, held)
    finally:
        form.close()
    form.check()
    return Received(form.fields, form.file_names)


class Form:
    """A form that is parsed as it arrives; its methods block, for they write files."""

    def __init__(self, boundary: bytes, folder: Path, kind: FormKind = ADAPTER_FORM) -> None:
        self.fields: dict[str, str] = {}
        self.file_names: dict[str, str] = {}
        self._kind = kind
        self._folder = folder
        self._file: BinaryIO | None = None
        self._field: str | None = None
        self._value = b""
        self._header = b""
        self._header_value = b""
        self._disposition = b""
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._open,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._complete,
            },
        )

    def feed(self, parts: Sequence[bytes]) -> None:
        """Parse further parts of the body. Raises InvalidRequest."""
        try:
            for part in parts:
                self._parser.write(part)
        except FormParserError as error:
            raise InvalidRequest(f"The body is no multipart/form-data: {error}") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def check(self) -> None:
        """Raises InvalidRequest when the form has not ended, or a file is missing."""
        missing = [name for name in self._kind.files if name not in self.file_names]
        if not self._is_complete:
            raise InvalidRequest("The form ends in the middle.")
        if missing:
            raise InvalidRequest(
                f"The form lacks the file {' and '.join(missing)}; send each as a part with a file name."
            )

    def _begin(self) -> None:
        self._header = self._header_value = self._disposition = self._value = b""
        self._field = None

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        file_name = options.get(b"filename")
        if file_name is None:
            self._field = options.get(b"name", b"").decode("utf-8", "replace")
            if self._field not in self._kind.fields:
                raise InvalidRequest(
                    f"The form has a field {self._field[:100]!r}; it takes {', '.join(self._kind.fields)}, and"
                    f" {len(self._kind.files)} with a file name."
                )
            if self._field in self.fields:
                raise InvalidRequest(f"The form has the field {self._field!r} twice.")
            return
        last_part = file_name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
        name = self._kind.place(last_part)
        if name in self.file_names:
            raise InvalidRequest(f"The form holds {name} twice.")
        self.file_names[name] = last_part
        self._file = (self._folder / name).open("xb")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"The form's field {self._field!r} is longer than {MAX_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        if self._file is not None:
            self.close()
        elif self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self._is_complete = True
