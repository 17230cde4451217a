"""Constrained sequences on the token stream: they wait for their grammars, and hold up nobody."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Abort, Constraint, Finish
from penstock.workers.serving.adapters import Adapters
from penstock.workers.serving.grammars import FAILED, Grammars
from tests.unit.workers.stream_fakes import IDLE, TIMEOUT_S, Bench, gain, soon, submit

pytestmark = pytest.mark.uvloop
WANTED = Constraint("regex", "a+")


class Loaded(NamedTuple):
    digest: str


class FakeGrammar:
    def __init__(self, constraint: Constraint, output: list[int], is_complete: bool = False) -> None:
        self.constraint = constraint
        self.output = output
        self.is_complete = is_complete


class FakeCompiler:
    """Compiles when it is let, and notes for whom."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, constraint: Constraint, tenant: str, output: list[int]) -> FakeGrammar:
        self.tenants.append(tenant)
        assert self.gate.wait(TIMEOUT_S)
        if constraint.text == "(":
            raise InvalidRequest("A bracket is open.")
        if constraint.text == "bug":
            raise ZeroDivisionError
        return FakeGrammar(constraint, output, is_complete=constraint.text == "whole")


@asynccontextmanager
async def serving(
    compiler: FakeCompiler | None, num_threads: int = 2, adapters: Adapters | None = None
) -> AsyncIterator[Bench]:
    bench = Bench()
    grammars = None if compiler is None else Grammars(compiler.compile, num_threads)
    port = await bench.server.start(bench.engine, IDLE, "127.0.0.1", grammars=grammars, adapters=adapters)
    bench.address = f"127.0.0.1:{port}"
    try:
        yield bench
    finally:
        if compiler is not None:
            compiler.gate.set()
        bench.server.stop()


async def test_a_constrained_sequence_comes_to_the_engine_with_its_grammar() -> None:
    async with serving(FakeCompiler()) as bench, bench.router() as router:
        router.send(submit(1, 6, constraint=WANTED, num_output_tokens=2, tenant="t"))
        seq = await soon(bench.engine.submitted)

        assert isinstance(seq.grammar, FakeGrammar)
        assert (seq.grammar.constraint, seq.grammar.output) == (WANTED, [4, 5])
        assert seq.needs_sampling
        bench.engine.step(gain(seq, 7, finish=Finish.STOP))
        assert [delta.finish for delta in await router.deltas(1)] == [Finish.STOP]


async def test_the_adapter_of_a_constrained_sequence_is_loaded_while_its_grammar_is_compiled() -> None:
    compiler = FakeCompiler()
    compiler.gate.clear()
    loaded = threading.Event()

    def load(digest: str, folder: Path) -> Loaded:
        loaded.set()
        return Loaded(digest)

    async with serving(compiler, adapters=Adapters(Path("store"), load, 2)) as bench, bench.router() as router:
        router.send(submit(1, constraint=WANTED, adapter="a"))
        assert await asyncio.to_thread(loaded.wait, TIMEOUT_S)
        assert bench.engine.submitted.empty()
        await router.frame_with(lambda frame: frame.load is not None and frame.load.resident_adapters == ("a",))
        compiler.gate.set()

        seq = await soon(bench.engine.submitted)

        assert (seq.request_id, seq.lora) == ("q1", Loaded("a"))


async def test_others_do_not_wait_for_a_grammar() -> None:
    compiler = FakeCompiler()
    compiler.gate.clear()
    async with serving(compiler) as bench, bench.router() as router:
        router.send(submit(1, constraint=WANTED), submit(2))
        first = await soon(bench.engine.submitted)
        assert first.request_id == "q2"
        compiler.gate.set()

        assert (await soon(bench.engine.submitted)).request_id == "q1"


@pytest.mark.parametrize(("text", "reason"), [("(", "A bracket is open."), ("bug", FAILED)])
async def test_a_constraint_that_can_not_be_compiled_ends_its_sequence_alone(text: str, reason: str) -> None:
    async with serving(FakeCompiler()) as bench, bench.router() as router:
        router.send(submit(1, constraint=Constraint("regex", text)), submit(2))
        (delta,) = await router.deltas(1)

        assert (delta.finish, delta.error) == (Finish.INVALID, reason)
        assert (await soon(bench.engine.submitted)).request_id == "q2"


async def test_a_replica_without_grammars_refuses_a_constraint() -> None:
    async with serving(None) as bench, bench.router() as router:
        router.send(submit(1, constraint=WANTED))
        (delta,) = await router.deltas(1)

        assert delta.finish is Finish.INVALID
        assert delta.error is not None
        assert bench.engine.submitted.empty()


async def test_an_answer_that_is_whole_already_only_ends() -> None:
    async with serving(FakeCompiler()) as bench, bench.router() as router:
        router.send(submit(1, 6, constraint=Constraint("regex", "whole"), num_output_tokens=2))
        (delta,) = await router.deltas(1)

        assert (delta.finish, delta.token_ids) == (Finish.STOP, [])
        assert bench.engine.submitted.empty()


async def test_a_sequence_that_is_aborted_while_it_waits_never_comes_to_the_engine() -> None:
    compiler = FakeCompiler()
    compiler.gate.clear()
    async with serving(compiler, num_threads=1) as bench, bench.router() as router:
        router.send(*[submit(sid, constraint=WANTED) for sid in (1, 2, 3)])
        await until(lambda: compiler.tenants)
        router.send(Abort(1), Abort(2))  # one is being compiled, the other waits for its turn
        for sid in (1, 2):
            (delta,) = await router.deltas(sid)
            assert delta.finish is Finish.ABORT
        compiler.gate.set()

        assert (await soon(bench.engine.submitted)).request_id == "q3"
        assert bench.engine.submitted.empty()
        assert len(compiler.tenants) == 2
        assert bench.server.num_inflight == 1


async def test_a_router_that_goes_leaves_no_wait_behind() -> None:
    compiler = FakeCompiler()
    compiler.gate.clear()
    async with serving(compiler) as bench:
        async with bench.router() as router:
            router.send(submit(1, constraint=WANTED))
            await until(lambda: compiler.tenants)
        await until(lambda: not bench.server.num_inflight)
        compiler.gate.set()
        async with bench.router("other") as other:
            other.send(submit(1))

            assert (await soon(bench.engine.submitted)).grammar is None
            assert bench.engine.aborted.empty()


async def test_tenants_take_turns() -> None:
    compiler = FakeCompiler()
    compiler.gate.clear()
    async with serving(compiler, num_threads=1) as bench, bench.router() as router:
        router.send(*[submit(sid, constraint=WANTED, tenant="a" if sid < 4 else "b") for sid in range(1, 6)])
        await until(lambda: bench.server.num_inflight == 5)
        compiler.gate.set()
        for _ in range(5):
            await soon(bench.engine.submitted)

        assert compiler.tenants == ["a", "a", "b", "a", "b"]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in a thread, or at the other end)
            await asyncio.sleep(0.001)
