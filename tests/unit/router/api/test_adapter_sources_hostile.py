"""What hostile addresses, redirects, servers and files do to a gateway that fetches adapters: nothing."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.adapters.peft import CONFIG_FILE, FILES, WEIGHTS_FILE
from penstock.base.tls import TlsFiles
from tests.certificates import Authority
from tests.unit.adapters.sources.servers import (
    Handler,
    Names,
    ReceivedRequest,
    adapter_files,
    below,
    files_at,
    response,
    tar_of,
    zip_of,
)
from tests.unit.router.api.fetching_gateway import SECRET, ask, fetching, nothing_is_left
from tests.unit.router.http_fakes import KEY


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    return Authority().issue(tmp_path / "tls", "files.test", "other.test", "cdn.test")


TARGETS = [
    ("https://127.0.0.1/", "has no address on the public internet"),
    ("https://[::1]/", "has no address on the public internet"),
    ("https://[::ffff:169.254.169.254]/", "has no address on the public internet"),
    ("https://2130706433/", "has no address on the public internet"),
    ("https://0x7f000001/", "has no address on the public internet"),
    ("https://0/", "has no address on the public internet"),
    ("https://169.254.169.254/latest/meta-data", "has no address on the public internet"),
    ("https://metadata.test/latest", "has no address on the public internet"),
    ("https://inside.test/", "has no address on the public internet"),
    ("https://both.test/", "has no address on the public internet"),
    ("https://other.test/", "has no address on the public internet"),
    ("https://other.test:6379/", "is not at port 443"),
    ("https://user:open-sesame@other.test/", "has a user or a password"),
]


@pytest.mark.parametrize(("target", "sentence"), TARGETS)
async def test_what_is_not_public_is_refused_directly_and_behind_a_redirect(
    target: str, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=302, location=target))

    async with fetching(tmp_path, handle, tls) as (adapters, server):
        refused = [await ask(adapters, source) for source in (target, f"https://files.test:{server.port}/a")]

        assert [response.status_code for response in refused] == [400, 400]
        assert all(sentence in response.text and "sesame" not in response.text for response in refused)
        assert nothing_is_left(adapters, tmp_path)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("http://{host}/a/b", "redirects from https to something else"),
        ("http://169.254.169.254/latest", "redirects from https to something else"),
        ("ftp://{host}/a", "redirects from https to something else"),
        ("file:///etc/passwd", "redirects from https to something else"),
        ("https://[::1", "redirects to what is no address"),
        ("https://{host}/again", "redirects more than 5 times"),
    ],
)
async def test_a_redirect_leads_neither_to_less_than_https_nor_round_and_round(
    target: str, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=301, location=target.format(host=asked.headers["host"])))

    async with fetching(tmp_path, handle, tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert refused.status_code in (400, 502)
        assert sentence in refused.text
        assert len(server.asked) <= 6
        assert nothing_is_left(adapters, tmp_path)


async def test_a_name_is_looked_up_once_and_what_it_meant_then_counts(tmp_path: Path, tls: TlsFiles) -> None:
    names = Names(files_test="127.0.0.1", turns_test=[["::ffff:10.0.0.1"], ["8.8.8.8"]])

    async def handle(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status=302, location="https://turns.test/a"))

    async with fetching(tmp_path, handle, tls, names=names) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, "has no address on the public internet" in refused.text) == (400, True)
        assert names.looked_up.count("turns.test") == 1


async def test_with_listed_hosts_alone_no_other_is_looked_up(tmp_path: Path, tls: TlsFiles) -> None:
    names = Names(files_test="127.0.0.1")
    async with fetching(tmp_path, files_at({}), tls, names=names, make=lambda _: {"https": "listed"}) as (adapters, _):
        refused = await ask(adapters, "https://8.8.8.8/a")

        assert (refused.status_code, "is not among the hosts" in refused.text, names.looked_up) == (400, True, [])


def endless(head: bytes) -> Handler:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(bytes(2**16))
            await writer.drain()

    return handle


async def silent(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\nx")
    await writer.drain()
    await asyncio.Event().wait()


async def dripping(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 100000\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def says(data: bytes) -> Handler:
    async def handle(_: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handle


@pytest.mark.parametrize(
    ("handle", "status", "sentence"),
    [
        (endless(b"HTTP/1.1 200 X\r\n\r\n"), 400, "is larger than"),
        (endless(b"HTTP/1.1 200 X\r\nx-endless: "), 502, "no HTTP"),
        (says(response(b"{}", length=2**40)), 400, "is larger than"),
        (says(response(b"{}", length=100)), 502, "broke off"),
        (says(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"), 502, "broke off"),
        (says(response(b"{}", content_encoding="gzip")), 502, "sends adapter_config.json encoded (gzip)"),
        (says(response(b"{}", content_encoding="identity, br")), 502, "encoded"),
        (says(response(b"<html>welcome</html>")), 400, "is not a JSON object"),
        (says(response(status=404)), 400, "has no adapter_config.json there (HTTP 404)"),
        (says(response(status=403)), 400, "does not give adapter_config.json away (HTTP 403)"),
        (says(response(status=206)), 502, "answered with HTTP 206"),
        (says(response(status=500)), 502, "answered with HTTP 500"),
        (says(response(status=429)), 502, "answered with HTTP 429"),
        (says(response(status=302)), 400, "redirects more than 5 times"),
        (says(b"SSH-2.0-OpenSSH\r\n"), 502, "no HTTP"),
        (says(b""), 502, "broke off"),
        (silent, 502, "it stopped sending"),
    ],
)  # fmt: skip
async def test_whatever_a_server_does_ends_in_a_sentence_and_leaves_nothing(
    handle: Handler, status: int, sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    stall_s = 1.0 if handle is silent else 30.0  # it bounds the way to the server too
    async with fetching(tmp_path, handle, tls, make=lambda _: {"https": "public", "stall_s": stall_s}) as (
        adapters,
        server,
    ):
        failed = await ask(adapters, f"https://files.test:{server.port}/a?token={SECRET}")

        error = failed.json()["error"]
        assert (failed.status_code, error["code"]) == (status, "source_failed" if status == 502 else None)
        assert sentence in error["message"]
        assert SECRET not in failed.text
        assert nothing_is_left(adapters, tmp_path)


async def test_a_slow_drip_ends_with_the_time_of_the_download(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, dripping, tls, make=lambda _: {"https": "public", "timeout_s": 0.3}) as (
        adapters,
        server,
    ):
        failed = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (failed.status_code, "did not deliver within 0.3 seconds" in failed.text) == (502, True)
        assert nothing_is_left(adapters, tmp_path)


async def test_a_server_that_is_not_there_or_speaks_no_tls_is_said_so(tmp_path: Path) -> None:
    async with fetching(tmp_path, files_at({}), None, make=lambda _: {"https": "listed", "stall_s": 0.5}) as (
        adapters,
        server,
    ):
        plain = await ask(adapters, f"https://files.test:{server.port}/a")
    async with fetching(
        tmp_path, files_at({}), None, make=lambda _: {"hosts": ("files.test:1",), "https": "listed"}
    ) as (
        adapters,
        _,
    ):
        absent = await ask(adapters, "http://files.test:1/a")

    assert [response.status_code for response in (plain, absent)] == [502, 502]
    assert "no connection came about" in absent.text


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        ({WEIGHTS_FILE: b"<html></html>"}, "is not a safetensors file"),
        ({WEIGHTS_FILE: b"\x80\x02pickle"}, "is not a safetensors file"),
        ({WEIGHTS_FILE: bytes(2**20)}, "is larger than"),
        ({CONFIG_FILE: b"[]"}, "is not a JSON object"),
        ({CONFIG_FILE: b'{"peft_type": "IA3"}'}, "only LORA is supported"),
        ({CONFIG_FILE: b" " * (2**20 + 1)}, "is larger than"),
    ],
)
async def test_files_are_checked_as_uploaded_ones_are(
    pages: dict[str, bytes], sentence: str, tmp_path: Path, tls: TlsFiles
) -> None:
    files = adapter_files(tmp_path / "a") | pages
    async with fetching(tmp_path, files_at(below("/a", files)), tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, sentence in refused.text) == (400, True), refused.text
        assert nothing_is_left(adapters, tmp_path)


async def test_a_cut_file_is_refused_and_leaves_the_adapter_as_it_was(tmp_path: Path, tls: TlsFiles) -> None:
    files = adapter_files(tmp_path / "a", fill=1)
    files[WEIGHTS_FILE] = files[WEIGHTS_FILE][:-1]
    async with fetching(tmp_path, files_at(below("/a", files)), tls) as (adapters, server):
        before = (await adapters.upload()).json()

        refused = await ask(adapters, f"https://files.test:{server.port}/a")

        assert (refused.status_code, "is not a safetensors file" in refused.text) == (400, True)
        assert (await adapters.get("/v1/adapters/mine")).json() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda files: tar_of(files | {"padding": bytes(2**24)}),
        lambda files: zip_of({CONFIG_FILE: b"{}", WEIGHTS_FILE: bytes(2**24)}),
        lambda files: tar_of(files | {"../../escape": b"x"}),
        lambda files: tar_of(files)[:-50],
    ],
    ids=["gzip bomb", "zip bomb", "a way out", "cut short"],
)
async def test_a_hostile_archive_leaves_nothing(
    make: Callable[[dict[str, bytes]], bytes], tmp_path: Path, tls: TlsFiles
) -> None:
    made = make(adapter_files(tmp_path / "a"))
    async with fetching(tmp_path, files_at({"/a.zip": made}), tls) as (adapters, server):
        refused = await ask(adapters, f"https://files.test:{server.port}/a.zip")

        assert (refused.status_code, "archive" in refused.text) == (400, True), refused.text
        assert nothing_is_left(adapters, tmp_path)
        assert "escape" not in {name for _, _, names in os.walk(tmp_path) for name in names}


async def test_a_client_that_hangs_up_ends_the_download(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, silent, tls) as (adapters, server):
        url = f"https://files.test:{server.port}/a"
        body = httpx.Request("POST", "http://gateway", json={"name": "mine", "source": url}).content
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            message = next(messages, None)
            if message is not None:
                return message
            await server.was_asked.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            raise AssertionError("there is nobody to be answered")

        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        await adapters.world.app(
            {"type": "http", "method": "POST", "path": "/v1/adapters", "headers": headers}, receive, send
        )

        async with asyncio.timeout(5):
            await server.client_left.wait()
        assert nothing_is_left(adapters, tmp_path)


async def test_nothing_is_fetched_for_a_name_that_can_not_be(tmp_path: Path, tls: TlsFiles) -> None:
    async with fetching(tmp_path, files_at({}), tls) as (adapters, server):
        url = f"https://files.test:{server.port}/a"
        refused = [await ask(adapters, url, **more) for more in ({"name": "a/b"}, {"base_model": "unknown"})]

        assert [response.status_code for response in refused] == [400, 400]
        assert server.asked == []


async def test_no_secret_of_a_source_is_in_a_log_or_an_answer(
    tmp_path: Path, tls: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "penstock")
    files = adapter_files(tmp_path / "a")
    query = f"?token={SECRET}"
    pages = {f"/a/{name}{query}": content for name, content in files.items()}
    pages |= {f"/moved/{name}{query}": response(status=302, location=f"/a/{name}{query}") for name in FILES}
    pages |= {f"/broken/{CONFIG_FILE}{query}": response(b"{}", length=50)}
    async with fetching(tmp_path, files_at(pages), tls) as (adapters, server):
        sources = [f"https://files.test:{server.port}/{path}{query}" for path in ("a", "moved", "broken", "absent")]
        answers = [await ask(adapters, source) for source in sources]

        assert [answer.status_code for answer in answers] == [201, 201, 502, 400]
        written = "\n".join(
            f"{record.getMessage()} {vars(record)}" for record in caplog.records if record.name != "asyncio"
        )
        assert "adapter registered" in written
        assert SECRET not in written
        assert SECRET not in "".join(answer.text for answer in answers)
        assert SECRET not in repr(adapters.registry.records)
