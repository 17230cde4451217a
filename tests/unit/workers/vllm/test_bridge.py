"""Conversions and messages of the bridge; how it serves is tested through the engine (vllm/test_engine.py)."""

import ast
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.workers.vllm import bridge as vllm_bridge
from penstock.workers.vllm.bridge import (
    Abort,
    AdapterLoaded,
    Add,
    CacheEvent,
    Cleared,
    Closed,
    EventCollector,
    LoadAdapter,
    Logprob,
    Message,
    Op,
    Output,
    Removed,
    Stepped,
    Stored,
    UnloadAdapter,
    Wire,
    make_event,
    make_logprob,
    make_output,
)


def entry(rank: int, logprob: float) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, logprob=logprob, decoded_token=None)


def request_output(reason: str | None, **changes: Any) -> SimpleNamespace:
    values = {"token_ids": [5, 6], "finish_reason": reason, "logprobs": None} | changes
    return SimpleNamespace(request_id="17", num_cached_tokens=32, outputs=[SimpleNamespace(**values)])


def test_it_imports_nothing_of_penstock_and_vllm_only_to_load_it() -> None:
    tree = ast.parse(Path(vllm_bridge.__file__).read_text(encoding="utf-8"))
    everywhere = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    everywhere |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    at_the_top = {
        str(node.module) if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }

    assert not any(name.startswith("penstock") for name in everywhere)
    assert {name.split(".")[0] for name in at_the_top} <= sys.stdlib_module_names | {"msgspec"}


@pytest.mark.parametrize(
    ("reason", "finish"), [(None, None), ("stop", "stop"), ("length", "length"), ("abort", "error"), ("error", "error")]
)
def test_an_output_is_told_with_its_reason(reason: str | None, finish: str | None) -> None:
    found = make_output(request_output(reason))

    assert (found.rid, found.token_ids, found.finish, found.num_cached_tokens) == (17, [5, 6], finish, 32)
    assert (found.error is None) == (finish != "error")


def test_logprobs_are_told_best_first() -> None:
    assert make_logprob(9, {9: entry(7, -4.0), 3: entry(2, -1.0), 2: entry(1, -0.5)}) == Logprob(
        -4.0, [(2, -0.5), (3, -1.0), (9, -4.0)]
    )
    found = make_output(request_output(None, logprobs=[{5: entry(1, -0.1)}, {6: entry(1, -0.2)}]))

    assert found.logprobs == [Logprob(-0.1, [(5, -0.1)]), Logprob(-0.2, [(6, -0.2)])]


def test_messages_arrive_whole_and_in_order() -> None:
    left, right = socket.socketpair()
    with left, right:
        up, down = Wire(left, Output), Wire(right, list[Op])
        sent: list[Op] = [Add(1, b"\1\0\0\0" * 1000, {"max_tokens": 3}, "salt"), Abort([1, 2])]
        up.send(sent)
        up.send([Abort([3])])

        assert down.receive() == sent
        assert down.receive() == [Abort([3])]


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x02\0\0\0\xa1x", b"\x05\0\0\0\x90", b""],
    ids=["huge", "invalid", "other", "short", "nothing"],
)
def test_what_is_no_message_closes_the_wire(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.close()

        with pytest.raises(Closed):
            Wire(right, list[Op]).receive()


def test_nothing_can_be_sent_to_an_end_that_is_gone() -> None:
    left, right = socket.socketpair()
    with left:
        right.close()

        with pytest.raises(Closed):
            Wire(left, Output).send([Abort([1])])


def test_every_message_arrives_as_it_was_sent() -> None:
    left, right = socket.socketpair()
    with left, right:
        up, down = Wire(left, Message), Wire(right, list[Op])
        ops: list[Op] = [LoadAdapter(3, "digest", "/folder"), Add(1, b"\1\0\0\0", {}, "salt", 3), UnloadAdapter(3)]
        events: list[CacheEvent] = [Stored(1, None, [2**64 - 1, b"x"]), Stored(1, 5, [6]), Removed([5]), Cleared()]
        messages: list[Message] = [AdapterLoaded(3), AdapterLoaded(4, "why"), Stepped(0.1, [], 0.5, events)]
        up.send(ops)
        for message in messages:
            down.send(message)

        assert down.receive() == ops
        assert [up.receive() for _ in messages] == messages


class BlockStored(SimpleNamespace):
    """Named as vLLM's."""


class BlockRemoved(SimpleNamespace):
    """Named as vLLM's."""


class AllBlocksCleared(SimpleNamespace):
    """Named as vLLM's."""


def stored(**changes: Any) -> BlockStored:
    usual = {"block_hashes": [4, 5], "parent_block_hash": 3, "token_ids": [0] * 32, "block_size": 16, "medium": "GPU"}
    return BlockStored(**(usual | {"group_idx": 0, "session_id": "17"} | changes))


def test_kv_events_are_told_by_the_number_of_their_sequence() -> None:
    removed = BlockRemoved(block_hashes=[4], medium="GPU", group_idx=0)

    assert make_event(stored(), 16) == Stored(17, 3, [4, 5])
    assert make_event(stored(parent_block_hash=None, medium=None, group_idx=None), 16) == Stored(17, None, [4, 5])
    assert make_event(removed, 16) == Removed([4])
    assert make_event(AllBlocksCleared(), 16) == Cleared()


@pytest.mark.parametrize(
    "changes",
    [{"medium": "CPU"}, {"group_idx": 1}, {"block_size": 8}, {"session_id": None}],
    ids=lambda item: next(iter(item)),
)
def test_kv_events_that_say_nothing_of_what_a_sequence_finds_are_left_out(changes: dict[str, Any]) -> None:
    assert make_event(stored(**changes), 16) is None


def test_a_publisher_that_vllm_was_given_gets_the_events_too() -> None:
    published: list[Any] = []
    own = SimpleNamespace(
        publish=published.append, shutdown=lambda: published.append("end"), get_publisher_config=lambda: 7
    )
    collector = EventCollector(own, 16)
    batch = SimpleNamespace(events=[stored(), stored(medium="CPU")])
    collector.publish(batch)
    collector.shutdown()

    assert (collector.take(), collector.take()) == ([Stored(17, 3, [4, 5])], [])
    assert published == [batch, "end"]
    assert collector.get_publisher_config() == 7
