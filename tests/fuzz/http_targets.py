"""Targets of what tenants and strangers send to a gateway: bodies, connections, forms, messages for a template."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from bench.support.free_ports import free_port
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.sources.reference import https_files, hub_files, read_reference, s3_files
from penstock.adapters.sources.rules import Rules, with_endpoints
from penstock.router.api.listing import read_query
from penstock.router.batches.lines import BadLine, check_not_streamed, encode_answer, parse_line, result_id
from penstock.router.batches.scan import scan
from penstock.router.dialects.messages import chat_of_messages, chat_to_count
from penstock.router.dialects.responses import chat_of_responses, repeated
from penstock.router.transport.listener import Listener
from penstock.router.transport.upload import ADAPTER_FORM, TEXT, TEXT_FORM, FormKind, boundary_of, receive
from penstock.text.template import ChatTemplate
from penstock.text.tools.forms import OWN_FORM, ToolForm
from penstock.text.tools.prompt import build_conversation
from penstock.wire.anthropic import CountTokensRequest, MessagesRequest
from penstock.wire.batches import LineResult
from penstock.wire.bodies import (
    decode_adapter_import,
    decode_batch,
    decode_chat,
    decode_completion,
    decode_count_tokens,
    decode_messages,
    decode_responses,
)
from penstock.wire.errors import InvalidRequest
from penstock.wire.fields import TABLE
from penstock.wire.openai import ChatRequest, CompletionRequest
from penstock.wire.responses import ResponsesRequest
from penstock.wire.support import check as check_support
from penstock.wire.tools import read_tools
from tests.fuzz.check import Target, raising
from tests.fuzz.inputs import bytes_like, encoded, objects, texts
from tests.unit.router.http_fakes import KEY, MODEL, running_gateway

ANSWER_S = 10.0
IDLE_S = 0.03
"""Silence after which nothing more is expected on a connection of noise, seconds."""

# request bodies

_CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_COMPLETION: dict[str, object] = {"model": "m", "prompt": "hi"}
_FULL_CHAT = _CHAT | {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": [1]}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [{}, None]}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stop": ["a", "b"],
    "logit_bias": {"5": 1.5},
    "stream_options": {"include_usage": True},
    "metadata": {"a": [1, {"b": None}]},
    "n": 3,
}


_TOOL_FORMS = (OWN_FORM, ToolForm("llama3", is_in_template=True), ToolForm("mistral", is_in_template=True))
_MESSAGES: dict[str, object] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
_FULL_MESSAGES = _MESSAGES | {
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": True}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object", "x": [{}, None]}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["a"],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
_RESPONSES: dict[str, object] = {"model": "m", "input": "hi"}
_FULL_RESPONSES = _RESPONSES | {
    "instructions": "a",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": [1]}'},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "b"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "x": [{}, None]}}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"summary": "auto"},
}


def _fields(struct: type) -> list[str]:
    return sorted(TABLE[struct])


@raising(InvalidRequest)
def _read_chat(data: bytes) -> None:
    _read_as_chat(decode_chat(data))


def _read_as_chat(request: ChatRequest) -> None:
    check_support(request)
    tools = read_tools(request)
    for form in _TOOL_FORMS:
        build_conversation(request.messages, tools, form)


@raising(InvalidRequest)
def _read_messages(data: bytes) -> None:
    _read_as_chat(chat_of_messages(decode_messages(data)))


@raising(InvalidRequest)
def _read_count(data: bytes) -> None:
    _read_as_chat(chat_to_count(decode_count_tokens(data)))


@raising(InvalidRequest)
def _read_responses(data: bytes) -> None:
    request = decode_responses(data)
    _read_as_chat(chat_of_responses(request))
    msgspec.json.encode(repeated(request))


@raising(InvalidRequest)
def _read_completion(data: bytes) -> None:
    check_support(decode_completion(data))


_read_import = raising(InvalidRequest)(decode_adapter_import)
_read_batch = raising(InvalidRequest)(decode_batch)
_SOURCES = (
    b"https://files.example:8443/a%2Fb/adapter/?token=x#y",
    b"https://user:word@[::ffff:7f00:1]:443/a.tar.gz",
    b"s3://bucket/a b/c+d",
    b"hub:owner/name@refs/pr/1",
    b"folder:a/b",
)
_RULES = Rules(with_endpoints(["files.example:8443"]), is_public_allowed=True, max_redirects=1)


@raising(InvalidRequest)
def _read_source(data: bytes) -> None:
    """What passes goes to the place that is configured for its kind, or is https without a user in it."""
    reference = read_reference(data.decode("utf-8", "replace"))
    if reference.kind == "s3":
        assert {url.netloc for url in s3_files("https://s3.example", reference.place).urls} == {b"s3.example"}
    elif reference.kind == "hub":
        urls = hub_files("https://hub.example", reference.place, reference.revision).urls
        assert all(url.path.startswith(f"/{reference.place}/resolve/") for url in urls)
    elif reference.kind == "https":
        for url in https_files(reference.place).urls:
            assert _RULES.check(url) or (url.scheme == "https" and url.port is None)
            assert not url.userinfo


# HTTP as a whole


@contextmanager
def _gateway() -> Iterator[Callable[[tuple[bytes, ...]], None]]:
    """A gateway without replicas behind its real listener; each input is a connection, its items are sent one by one.
    Afterwards the next request is answered as ever."""
    runner = asyncio.Runner()
    stack = AsyncExitStack()

    async def start() -> int:
        world = await stack.enter_async_context(running_gateway())
        port = free_port()
        listener = Listener(world.app, "127.0.0.1", [port], 1)
        listener.start()
        stack.push_async_callback(listener.stop)
        return port

    async def give(parts: tuple[bytes, ...]) -> None:
        answer = await _exchange(port, parts, IDLE_S)
        if answer and not answer.startswith(b"HTTP/1."):
            raise AssertionError(f"an answer begins with {answer[:20]!r}")
        if answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502", b"HTTP/1.1 504")):
            raise AssertionError(f"an answer is {answer[:200]!r}")
        if not (await _exchange(port, [_GOOD], ANSWER_S)).startswith(b"HTTP/1.1 200"):
            raise AssertionError("a good request is not answered any more")

    with runner:
        port = runner.run(start())
        try:
            yield lambda parts: runner.run(give(parts))
        finally:
            runner.run(stack.aclose())


async def _exchange(port: int, parts: Sequence[bytes], idle_s: float) -> bytes:
    """All that comes back, until the gateway closes or is silent for so long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        while True:
            async with asyncio.timeout(idle_s):
                some = await reader.read(2**16)
            if not some:
                return answer
            answer += some
    except (OSError, TimeoutError):
        return answer
    finally:
        writer.transport.abort()


_BODY = encoded({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
_HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
_GOOD = f"{_HEAD}Connection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n".encode() + _BODY
_REQUESTS = (
    _GOOD,
    f"{_HEAD}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{len(_BODY):x};a=b\r\n".encode()
    + _BODY
    + b"\r\n0\r\nTrailer: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    f"GET /v1/receipts/%00%ff?a=b HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode(),
    f"{_HEAD}Expect: 100-continue\r\nConnection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n".encode() + _BODY,
    f"{_HEAD}traceparent: 00-{'a' * 32}-{'b' * 16}-01\r\ntracestate: a=b\r\nConnection: close\r\nContent-Length: 2"
    "\r\n\r\n{}".encode(),
)
_connections = st.lists(bytes_like(*_REQUESTS), min_size=1, max_size=3).map(tuple)


# uploads

_FORM = (
    b'--B\r\nContent-Disposition: form-data; name="name"\r\n\r\nmine\r\n'
    b'--B\r\nContent-Disposition: form-data; name="f"; filename="adapter_config.json"\r\n\r\n{}\r\n'
    b'--B\r\nContent-Disposition: form-data; name="f"; filename="adapter_model.safetensors"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n\x00\x01\r\n--B--\r\n"
)
_TYPE = b'multipart/form-data; boundary="B"'


def _receive(given: tuple[bytes, bytes, int], folder: Path, kind: FormKind = ADAPTER_FORM) -> None:
    """Receive the form in pieces of so many bytes, if its content type names a boundary."""
    content_type, form, step = given
    boundary = boundary_of(content_type)

    async def parts() -> AsyncIterator[bytes]:
        for begin in range(0, len(form), step):
            yield form[begin : begin + step]

    if boundary is not None:
        asyncio.run(receive(boundary, parts(), folder, kind))


@raising(InvalidRequest)
def _upload(given: tuple[bytes, bytes, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outside = set(Path(folder).parent.glob("adapter_*"))
        try:
            _receive(given, Path(folder))
        finally:
            assert {path.name for path in Path(folder).rglob("*")} <= {CONFIG_FILE, WEIGHTS_FILE}
            assert set(Path(folder).parent.glob("adapter_*")) == outside


@raising(InvalidRequest)
def _upload_text(given: tuple[bytes, bytes, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _receive(given, Path(folder), TEXT_FORM)
        finally:
            assert {path.name for path in Path(folder).rglob("*")} <= {TEXT}


# files of batches

_ENDPOINT = "/v1/completions"
_LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"model":"m","prompt":["hi"]}}'
_TEXT_FORM = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + _LINE + b"\n\r\n--B--\r\n"
)


def _read_line(data: bytes) -> None:
    """A line is read or refused, its request may be looked at, and its result is one line with its id and name."""
    try:
        line = parse_line(data, _ENDPOINT)
    except BadLine:
        return
    with contextlib.suppress(InvalidRequest):
        check_not_streamed(line.body)
    result = encode_answer("batch_00", 7, line.custom_id, 200, "q", line.body)
    assert b"\n" not in result
    found = msgspec.json.decode(result, type=LineResult)
    assert (found.id, found.custom_id) == (result_id("batch_00", 7), line.custom_id)


def _scan_text(data: bytes) -> None:
    """Where there are no errors, every line is found again at its place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        path.write_bytes(data)
        found = scan(path, _ENDPOINT, max_lines=20, max_line_bytes=400)
        names = [found.read(number).custom_id for number in range(len(found.starts))] if not found.errors else []
        assert len(set(names)) == len(names)


# templates

_TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}{% if m.content[0] == 'x' %}"
    "{{ raise_exception('no') }}{% endif %}{% endfor %}",
    {},
)
_messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(("user", "system")), "content": texts}), max_size=6)


HTTP_TARGETS: dict[str, Target] = {
    "chat-body": Target(st.one_of(objects(_fields(ChatRequest), _CHAT), bytes_like(encoded(_FULL_CHAT))), _read_chat),
    "completion-body": Target(
        st.one_of(objects(_fields(CompletionRequest), _COMPLETION), bytes_like(encoded(_COMPLETION))),
        _read_completion,
    ),
    "messages-body": Target(
        st.one_of(objects(_fields(MessagesRequest), _MESSAGES), bytes_like(encoded(_FULL_MESSAGES))), _read_messages
    ),
    "count-tokens-body": Target(
        st.one_of(objects(_fields(CountTokensRequest), _MESSAGES), bytes_like(encoded(_FULL_MESSAGES))), _read_count
    ),
    "responses-body": Target(
        st.one_of(objects(_fields(ResponsesRequest), _RESPONSES), bytes_like(encoded(_FULL_RESPONSES))),
        _read_responses,
    ),
    "import-body": Target(bytes_like(b'{"name":"a","path":"b","base_model":null}'), _read_import),
    "adapter-source": Target(bytes_like(*_SOURCES), _read_source),
    "http": Target(_connections, _gateway),
    "multipart": Target(
        st.tuples(st.one_of(st.just(_TYPE), bytes_like(_TYPE)), bytes_like(_FORM), st.integers(1, 64)), _upload
    ),
    "text-form": Target(
        st.tuples(st.one_of(st.just(_TYPE), bytes_like(_TYPE)), bytes_like(_TEXT_FORM), st.integers(1, 64)),
        _upload_text,
    ),
    "batch-body": Target(
        bytes_like(
            b'{"input_file_id":"f","endpoint":"/v1/completions","completion_window":"24h","metadata":{"a":"b"}}'
        ),
        _read_batch,
    ),
    "batch-line": Target(bytes_like(_LINE), raising()(_read_line)),
    "batch-text": Target(bytes_like(b"\n".join([_LINE, b"", _LINE.replace(b'"a"', b'"b"')])), raising()(_scan_text)),
    "list-query": Target(
        bytes_like(b"after=file-1&limit=5&order=asc&purpose=batch"),
        raising(InvalidRequest)(lambda data: read_query(data, 20, 100)),
    ),
    "chat-template": Target(_messages, raising(InvalidRequest)(lambda messages: _TEMPLATE.render(messages, {}))),
}
