"""Answers of the fake server: token ids from a digest of the request, and the bytes of every frame, faults included.
Pure.

The same request always gets the same answer. A frame is what goes out at one time, as chunks of HTTP/1.1.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import shake_128
from typing import NamedTuple

import msgspec

from penstock_loadtest.fake.behaviour import Fault
from penstock_loadtest.fake.truth import Chunk

VOCAB_SIZE = 4096
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
WORDS = [
    f" {_CONSONANTS[i >> 8]}{_VOWELS[i >> 6 & 3]}{_CONSONANTS[i >> 2 & 15]}{_VOWELS[i & 3]}" for i in range(VOCAB_SIZE)
]
"""Text of every token: a space and four letters, so that a text shows how many tokens it has."""
_WORDS = [word.encode() for word in WORDS]

ERROR_EVENT = (
    b'data: {"error":{"message":"The fake engine failed, as it was told to.",'
    b'"type":"server_error","param":null,"code":"engine_fault"}}\n\n'
)
ERROR_500 = (
    b'{"error":{"message":"The fake server failed, as it was told to.",'
    b'"type":"server_error","param":null,"code":"internal_error"}}'
)
_LAST_CHUNK = b"0\r\n\r\n"


class Frame(NamedTuple):
    """Bytes that go out at one time."""

    offset_s: float
    """Seconds after the start at which it is due."""
    data: bytes
    tokens: int = 0
    closes: bool = False
    """Whether the connection closes after it."""


class Reply(NamedTuple):
    """The content of an answer, whenever it is sent."""

    answer_id: str
    created: int
    model: str
    is_chat: bool
    token_ids: Sequence[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    has_usage: bool
    has_token_ids: bool
    headers: str  # further response headers, a line each, every line with its end


def make_token_ids(digest: bytes, count: int) -> list[int]:
    """The first `count` tokens of an answer: a longer answer to the same request begins with a shorter one."""
    drawn = array("H", shake_128(digest).digest(2 * count))
    return [token & (VOCAB_SIZE - 1) for token in drawn]


def join_words(token_ids: Sequence[int]) -> str:
    return "".join([WORDS[token] for token in token_ids])


def format_head(status: str, headers: str, length: int | None = None, content_type: str = "application/json") -> bytes:
    """Status line and headers. `length` None: the body comes in chunks."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n{framing}\r\n{headers}\r\n".encode()


def make_frames(
    reply: Reply, chunks: Sequence[Chunk], fault: Fault | None, *, stream: bool, early_headers: bool
) -> Iterator[Frame]:
    """The frames of an answer, in order of time. A fault that keeps everything back has none."""
    kind = None if fault is None else fault.kind
    if kind == "hang":
        return iter(())
    if kind == "close_before_headers":
        return iter([Frame(chunks[0].offset_s, b"", closes=True)])
    if kind == "status_500":
        return iter(
            [
                Frame(
                    chunks[0].offset_s,
                    format_head("500 Internal Server Error", reply.headers, len(ERROR_500)) + ERROR_500,
                )
            ]
        )
    if stream:
        head = format_head("200 OK", reply.headers, content_type="text/event-stream; charset=utf-8")
        return _with_head(head, _stream(reply, chunks, fault), fault, early=early_headers)
    body = _whole_body(reply, extra=int(kind == "wrong_usage"))
    closes = kind == "close_mid_stream"
    whole = Frame(
        chunks[-1].offset_s, body[: len(body) // 2] if closes else body, 0 if closes else len(reply.token_ids), closes
    )
    return _with_head(format_head("200 OK", reply.headers, len(body)), iter([whole]), fault, early=early_headers)


def _with_head(head: bytes, rest: Iterator[Frame], fault: Fault | None, *, early: bool) -> Iterator[Frame]:
    """The frames with the head put into the first one, or sent before it."""
    delay_s = 0.0
    if fault is not None and fault.kind == "slow_headers":
        line, _, head = head.partition(b"\r\n")
        yield Frame(0.0, line + b"\r\n")
        delay_s, early = fault.delay_s, True
    if early:
        yield Frame(delay_s, head)
        head = b""
    for frame in rest:
        yield (
            frame._replace(offset_s=max(frame.offset_s, delay_s), data=head + frame.data) if head or delay_s else frame
        )
        head = b""


def _stream(reply: Reply, chunks: Sequence[Chunk], fault: Fault | None) -> Iterator[Frame]:
    """The frames of a streamed answer, one for each chunk; the last one holds the end too."""
    before, behind = _envelope(reply)
    cut = _cut(fault, len(reply.token_ids))
    sent = 0
    for offset_s, count in chunks:
        if cut is not None and sent + count > cut:
            yield _broken_off(fault, offset_s)
            return
        data = _event(reply, before, behind, sent, sent + count)
        sent += count
        if sent == len(reply.token_ids):
            tail, extra = _end(reply, before, behind, fault)
            yield Frame(offset_s, _http_chunk(data) + _http_chunk(tail) + _LAST_CHUNK, count + extra)
        else:
            yield Frame(offset_s, _http_chunk(data), count)


def _cut(fault: Fault | None, tokens: int) -> int | None:
    if fault is None or fault.kind not in ("close_mid_stream", "error_event"):
        return None
    return min(tokens - 1, tokens // 2 if fault.after_tokens is None else fault.after_tokens)


def _broken_off(fault: Fault | None, offset_s: float) -> Frame:
    if fault is not None and fault.kind == "error_event":
        return Frame(offset_s, _http_chunk(ERROR_EVENT) + _LAST_CHUNK)
    return Frame(offset_s, b"", closes=True)


def _end(reply: Reply, before: bytes, behind: bytes, fault: Fault | None) -> tuple[bytes, int]:
    """Everything behind the last token, and how many tokens a fault puts there."""
    kind = None if fault is None else fault.kind
    finish = b'"finish_reason":"%b"' % reply.finish_reason.encode()
    ids = b',"token_ids":[]' if reply.has_token_ids else b""
    events = [b"%b%b%b%b%b" % (before, b'"delta":{},' if reply.is_chat else b'"text":"",', finish, ids, behind)]
    if kind == "double_finish":
        events *= 2
    if kind == "content_after_finish":
        events.append(_event(reply, before, behind, 0, 1))
    if reply.has_usage:
        events.append(
            before.partition(b'"choices"')[0]
            + b'"choices":[],"usage":'
            + _usage(reply, extra=int(kind == "wrong_usage"))
            + b"}\n\n"
        )
    if kind != "no_done":
        events.append(b"data: [DONE]\n\n")
    return b"".join(events), int(kind == "content_after_finish")


def _envelope(reply: Reply) -> tuple[bytes, bytes]:
    """What every event of a stream has before and behind its own."""
    kind = "chat.completion.chunk" if reply.is_chat else "text_completion"
    model = msgspec.json.encode(reply.model).decode()
    before = (
        f'data: {{"id":"{reply.answer_id}","object":"{kind}","created":{reply.created},"model":{model},'
        '"choices":[{"index":0,'
    )
    return before.encode(), b'}],"usage":null}\n\n' if reply.has_usage else b"}]}\n\n"


def _event(reply: Reply, before: bytes, behind: bytes, begin: int, end: int) -> bytes:
    """The event with tokens begin..end."""
    token_ids = reply.token_ids[begin:end]
    text = b"".join([_WORDS[token] for token in token_ids])
    if not reply.is_chat:
        own = b'"text":"%b",' % text
    elif begin == 0:
        own = b'"delta":{"role":"assistant","content":"%b"},' % text
    else:
        own = b'"delta":{"content":"%b"},' % text
    ids = b',"token_ids":[%b]' % ",".join(map(str, token_ids)).encode() if reply.has_token_ids else b""
    return b'%b%b"finish_reason":null%b%b' % (before, own, ids, behind)


def _usage(reply: Reply, *, extra: int) -> bytes:
    completion = len(reply.token_ids) + extra
    return (
        f'{{"prompt_tokens":{reply.prompt_tokens},"completion_tokens":{completion},'
        f'"total_tokens":{reply.prompt_tokens + completion},'
        f'"prompt_tokens_details":{{"cached_tokens":{reply.cached_tokens}}}}}'
    ).encode()


def _whole_body(reply: Reply, *, extra: int) -> bytes:
    text = join_words(reply.token_ids)
    content = {"message": {"role": "assistant", "content": text}} if reply.is_chat else {"text": text}
    ids = {"token_ids": reply.token_ids} if reply.has_token_ids else {}
    answer = {
        "id": reply.answer_id,
        "object": "chat.completion" if reply.is_chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reply.finish_reason, **ids}],
        **({"usage": msgspec.Raw(_usage(reply, extra=extra))} if reply.has_usage else {}),
    }
    return msgspec.json.encode(answer)


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
