"""The form, in pieces of any size."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.router.transport.upload import MAX_FIELD_BYTES, boundary_of, receive
from penstock.wire.errors import InvalidRequest

CONTENTS = {CONFIG_FILE: b'{"r": 8}', WEIGHTS_FILE: bytes(range(256)) * 40 + b"\r\n--b\r\r\n"}


def form(boundary: bytes = b"bound") -> bytes:
    parts = [b'Content-Disposition: form-data; name="name"\r\n\r\nmine']
    for name, data in CONTENTS.items():
        header = (
            b'Content-Disposition: form-data; name="file"; filename="'
            + name.encode()
            + b'"\r\nContent-Type: application/octet-stream\r\n\r\n'
        )
        parts.append(header + data)
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


async def split_at(data: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    for start, end in pairwise(edges):
        yield data[start:end]


@given(cuts=st.lists(st.integers(0, len(form())), max_size=8))
def test_a_form_is_read_alike_wherever_it_is_cut(cuts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("form")

    fields = asyncio.run(receive(b"bound", split_at(form(), cuts), folder)).fields

    assert fields == {"name": "mine"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


@given(end=st.integers(0, len(form()) - 1))
def test_a_form_cut_short_is_never_taken_for_a_whole_one(end: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = form()
    is_whole = data[:end].rstrip(b"\r\n").endswith(b"--bound--")
    if is_whole:
        return

    with pytest.raises(InvalidRequest):
        asyncio.run(receive(b"bound", split_at(data[:end], []), tmp_path_factory.mktemp("form")))


def test_a_file_name_with_a_path_in_it_stays_in_the_folder(tmp_path: Path) -> None:
    data = (
        form()
        .replace(CONFIG_FILE.encode(), b"../../etc/" + CONFIG_FILE.encode())
        .replace(WEIGHTS_FILE.encode(), b"C:\\x\\" + WEIGHTS_FILE.encode())
    )
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)

    asyncio.run(receive(b"bound", split_at(data, []), folder))

    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            b'--bound\r\nContent-Disposition: form-data; name="name"\r\n' + b"X-Long: " + b"x" * 2**16,
            "is no multipart/form-data",
        ),
        (b"--bound\r\n" + b"x" * 2**16, "is no multipart/form-data"),
        (b"--bound\r\n" + b"A: b\r\n" * 2**10, "is no multipart/form-data"),
        (
            b'--bound\r\nContent-Disposition: form-data; name="name"\r\n\r\n' + b"x" * (MAX_FIELD_BYTES + 1),
            "field 'name' is longer than",
        ),
        (b'--bound\r\nContent-Disposition: form-data; name="name"\r\n\r\nx\r\n' * 2, "has the field 'name' twice"),
        (b'--bound\r\nContent-Disposition: form-data; name="file"; filename="../../x.zip"\r\n\r\n', "not 'x.zip'"),
        (b"--bound\r\n\r\n", "has a field ''"),
    ],
)
def test_a_form_that_holds_what_it_may_not_is_refused_as_soon_as_that_is_seen(
    data: bytes, sentence: str, tmp_path: Path
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield data
        while True:
            yield b"x" * 2**16

    with pytest.raises(InvalidRequest, match=sentence):
        asyncio.run(receive(b"bound", endless(), tmp_path))

    assert list(tmp_path.iterdir()) == []


def test_a_boundary_is_read_off_the_content_type() -> None:
    assert boundary_of(b'multipart/form-data; boundary="a b"') == b"a b"
    assert boundary_of(b"application/json") is None
    assert boundary_of(b"") is None
