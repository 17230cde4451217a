"""Conversions and messages of the bridge; how it serves is tested through the engine (vllm/test_engine.py)."""

import ast
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.workers.vllm import bridge as vllm_bridge
from penstock.workers.vllm.bridge import Abort, Add, Closed, Logprob, Op, Output, Wire, make_logprob, make_output


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
