import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from penstock.router.completions.completion import (
    MOST_QUEUED,
    STARTED_AT_ONCE,
    Choice,
    Collector,
    Completion,
    DeltaListener,
    Emitter,
)
from penstock.router.completions.prediction_count import PredictedTokens, PredictionCount
from penstock.router.completions.reasoning_assembly import AnswerReasoning, ReasoningAssembler
from penstock.router.completions.text_assembly import TextAssembler, TextPiece
from penstock.router.routing.request import AnsweringModel, Generation, HoldListener, LazyPrompt, TokenizedPrompt
from penstock.text.stops import StopAutomaton
from penstock.wire.errors import DeadlineExceeded, Overloaded, PenstockError, RateLimited, ReplicaLost
from penstock.wire.frames import Delta, SamplingParams, pack_token_ids
from penstock.wire.openai import CompletionTokensDetails
from tests.unit.router.http_fakes import TOKENIZER, FakeDispatcher, FakeStream, Script, byte_tokenizer


def choice(index: int, stops: tuple[str, ...] = (), deadline: float = 0.0) -> Choice:
    generation = Generation(
        f"r-{index}", ("pool-a",), pack_token_ids([1, 2, 3]), 3, SamplingParams(10), "tenant-1", b"salt", deadline
    )
    return Choice(index, generation, TextAssembler(TOKENIZER, StopAutomaton(stops)))


def completion(dispatcher: FakeDispatcher, emitter: Emitter, prompts: Sequence[Sequence[Choice]]) -> Completion:
    return Completion(prompts, dispatcher, lambda: 0.0, emitter)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Waiting:
    """An emitter that takes pieces only by being awaited."""

    def __init__(self, emit: Callable[[Choice, TextPiece], Awaitable[None]]) -> None:
        self._emit = emit

    async def begin(self, choice: Choice) -> None:
        """Nothing is shown of a prompt."""

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        await self._emit(choice, piece)

    def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
        return None


async def test_a_stream_is_closed_before_its_last_piece_goes_to_a_slow_client() -> None:
    dispatcher = FakeDispatcher(Script("abc", hold_after=2))
    open_at_finish: list[int] = []

    async def emit(choice: Choice, piece: TextPiece) -> None:
        if piece.finish:
            open_at_finish.append(dispatcher.num_open)

    await completion(dispatcher, Waiting(emit), [[choice(0, ("b",))]]).run()

    assert open_at_finish == [0]


async def test_while_a_piece_is_not_taken_the_stream_is_not_read() -> None:
    dispatcher = FakeDispatcher(Script("abc"))
    taken = asyncio.Event()

    async def emit(choice: Choice, piece: TextPiece) -> None:
        await taken.wait()

    running = asyncio.create_task(completion(dispatcher, Waiting(emit), [[choice(0)]]).run())
    await settle()
    given = dispatcher.streams[0].num_given
    taken.set()
    await running

    assert given == 1
    assert dispatcher.num_open == 0


async def test_choices_are_collected_in_order_and_counted_once() -> None:
    dispatcher = FakeDispatcher(Script("ab", cached_tokens=2))
    collector = Collector()
    done = completion(dispatcher, collector, [[choice(0), choice(1)], [choice(2), choice(3)]])
    await done.run()
    usage = done.usage()

    assert [(whole.index, whole.text) for whole in collector.choices()] == [
        (0, "ab"),
        (1, "ab"),
        (2, "ab"),
        (3, "ab"),
    ]
    assert (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        usage.prompt_tokens_details.cached_tokens,
    ) == (6, 8, 14, 4)


@pytest.mark.parametrize("prompts", [[[0]], [[0, 1, 2]], [[0], [1]]])
async def test_the_streams_own_error_comes_out_and_nothing_stays_open(prompts: list[list[int]]) -> None:
    dispatcher = FakeDispatcher(Script("a", error=ReplicaLost("gone")))
    failing = completion(dispatcher, Collector(), [[choice(index) for index in prompt] for prompt in prompts])

    with pytest.raises(ReplicaLost):
        await failing.run()

    assert dispatcher.num_open == 0


async def test_behind_the_first_piece_plain_deltas_are_taken_as_they_come_and_the_rest_waits_for_the_reader() -> None:
    dispatcher = FakeDispatcher(Script("ad", hold_after=1))
    collector = Collector()
    running = completion(dispatcher, collector, [[choice(0)]])
    task = asyncio.create_task(running.run())
    await settle()
    listener = dispatcher.streams[0].listener
    assert listener is not None

    assert listener(Delta(1, [ord("b")]))
    assert listener(Delta(1, [ord("c")]))
    dispatcher.streams[0].resume()
    await task

    assert next(collector.choices()).text == "abcd"
    assert running.usage().completion_tokens == 4


async def test_a_search_that_is_given_up_counts_what_its_beams_have_computed() -> None:
    dispatcher = FakeDispatcher(Script("abcd", hold_after=2))
    searching = choice(0)
    searching.generation = replace(searching.generation, sampling=SamplingParams(10, num_beams=3, num_returned=1))
    running = completion(dispatcher, Collector(), [[searching]])
    task = asyncio.create_task(running.run())
    await settle()
    assert running.usage().completion_tokens == 2 * 3

    task.cancel()
    await asyncio.wait([task])

    assert running.usage().completion_tokens == 2 * 3
    assert dispatcher.num_open == 0


async def test_what_is_taken_as_it_comes_is_looked_for_in_the_prediction_and_what_is_declined_is_not() -> None:
    dispatcher = FakeDispatcher(Script("ad", hold_after=1))
    predicted = PredictionCount(PredictedTokens(pack_token_ids([*b"abcde"])))
    is_declining = False

    class Declining(Collector):
        def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
            take = super().listener(choice, clock)
            return lambda delta: not is_declining and take is not None and take(delta)

    only = choice(0)
    only.predicted = predicted
    running = completion(dispatcher, Declining(), [[only]])
    task = asyncio.create_task(running.run())
    await settle()
    listener = dispatcher.streams[0].listener
    assert listener is not None
    assert listener(Delta(1, [ord("b"), ord("c")]))
    is_declining = True

    assert not listener(Delta(1, [ord("d")]))
    assert (predicted.num_accepted, predicted.num_rejected) == (3, 2)
    dispatcher.streams[0].resume()
    await task
    assert running.usage().completion_tokens_details == CompletionTokensDetails(
        accepted_prediction_tokens=4, rejected_prediction_tokens=1
    )


@pytest.mark.parametrize(("stops", "is_ready"), [(("x",), True), ((), False)])
async def test_with_stop_strings_or_a_client_that_does_not_read_every_delta_waits_for_the_reader(
    stops: tuple[str, ...], is_ready: bool
) -> None:
    async def emit(choice: Choice, piece: TextPiece) -> None:
        """The delta is taken."""

    dispatcher = FakeDispatcher(Script("ad", hold_after=1))
    task = asyncio.create_task(
        completion(dispatcher, Collector() if is_ready else Waiting(emit), [[choice(0, stops)]]).run()
    )
    await settle()
    listener = dispatcher.streams[0].listener

    assert listener is None or not listener(Delta(1, [ord("b")]))
    dispatcher.streams[0].resume()
    await task


async def test_the_siblings_of_a_first_choice_start_a_few_at_a_time_and_others_run_between() -> None:
    dispatcher = FakeDispatcher(Script("ab"))
    num_started: list[int] = []

    async def watch() -> None:
        while not num_started or num_started[-1] < 32:
            num_started.append(len(dispatcher.generations))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await completion(dispatcher, Collector(), [[choice(index) for index in range(32)]]).run()
    await watching

    steps = [after - before for before, after in itertools.pairwise(num_started)]
    assert max(steps) <= STARTED_AT_ONCE
    assert dispatcher.num_open == 0


class Refusing(FakeDispatcher):
    """Refuses all but the first of the sequences some times, then all of them as its `last`."""

    def __init__(self, script: Script, refusals: Sequence[PenstockError]) -> None:
        super().__init__(script)
        self._refusals = list(refusals)

    async def start(self, generation: Generation, listener: HoldListener | None = None) -> FakeStream:
        if self._refusals and self.streams:
            raise self._refusals.pop(0)
        return await super().start(generation, listener)


async def test_a_sibling_that_the_queue_refuses_waits_since_the_answer_has_begun() -> None:
    refusals = [RateLimited("its share", retry_after_s=0.01), Overloaded("full", retry_after_s=0.01)]
    dispatcher = Refusing(Script("ab"), refusals)
    collector = Collector()

    await completion(dispatcher, collector, [[choice(index, deadline=60.0) for index in range(3)]]).run()

    assert [each.text for each in collector.choices()] == ["ab"] * 3


async def test_a_sibling_waits_no_longer_than_its_deadline() -> None:
    refusals = [RateLimited("its share", retry_after_s=60.0), DeadlineExceeded("passed")]

    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(5):
            await completion(Refusing(Script("ab"), refusals), Collector(), [[choice(0), choice(1)]]).run()


async def test_while_nothing_has_begun_a_refusal_is_the_requests() -> None:
    dispatcher = FakeDispatcher(Script("ab", refusal=RateLimited("its share", retry_after_s=0.01)))

    with pytest.raises(RateLimited):
        await completion(dispatcher, Collector(), [[choice(0)], [choice(1)]]).run()


async def test_only_a_few_sequences_of_a_request_queue_at_the_same_time() -> None:
    gate = asyncio.Event()
    dispatcher = FakeDispatcher(Script("ab", hold_start=gate))
    task = asyncio.create_task(completion(dispatcher, Collector(), [[choice(index)] for index in range(32)]).run())
    await settle()

    num_queued = dispatcher.num_waiting
    gate.set()
    await task

    assert num_queued == MOST_QUEUED
    assert len(dispatcher.streams) == 32


class Elsewhere(FakeDispatcher):
    """Answers by the further model of every generation."""

    async def start(self, generation: Generation, listener: HoldListener | None = None) -> FakeStream:
        stream = await super().start(generation, listener)
        stream.receipt.answering_model = generation.lazy_prompts[0].answering_model
        return stream


async def test_another_model_thinks_as_its_own_prompt_says() -> None:
    async def tokenize() -> TokenizedPrompt:
        return TokenizedPrompt(pack_token_ids([*b"<think>"]), 7, SamplingParams(10))

    lazy = LazyPrompt(tokenize, AnsweringModel("fp_other", byte_tokenizer().with_reasoning_parser("qwen3")))
    await lazy.load()
    first = choice(0)
    first.generation = replace(first.generation, lazy_prompts=(lazy,))
    first.assembler = ReasoningAssembler(TextAssembler(TOKENIZER), AnswerReasoning(), TOKENIZER, b"")
    collector = Collector()

    await completion(Elsewhere(Script("a</think>b")), collector, [[first]]).run()

    (finished,) = collector.choices()
    assert (finished.reasoning, finished.text) == ("a", "b")
