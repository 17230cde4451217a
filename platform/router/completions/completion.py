"""The sequences of one request: started, read to their ends, and closed whatever happens.

Not HTTP. The siblings of a prompt's first choice (`n` > 1) start when its first token is there: by then the prompt's
blocks are published, and they find their whole prefix. Only a few sequences of a request queue at the same time, and
once one has begun to answer, those that find no room in the queue wait for it: a status of 200 has gone out. Where a
prompt's first choice is escalated (`escalation`), its siblings go where it went. Invariant: when `run` is over, however
it ends, every stream is closed.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.router.completions.echo import Echo
from penstock.router.completions.escalation import HeldStream, Trial, away_first
from penstock.router.completions.formats import FinishedCall, FinishedChoice
from penstock.router.completions.prediction_count import PredictionCount
from penstock.router.completions.text_assembly import Assembler, TextPiece
from penstock.router.routing.request import CallDelta, Dispatcher, Generation, HoldListener, Receipt, Stream
from penstock.wire.errors import CapReached, Overloaded, RateLimited
from penstock.wire.frames import Delta, PromptLogprobs
from penstock.wire.openai import CompletionTokensDetails, PromptTokensDetails, Usage


@dataclass(slots=True)
class Choice:
    """One sequence, and what is known of it so far. Times are seconds on the monotonic clock that `Completion` was
    given."""

    index: int
    generation: Generation
    assembler: Assembler
    receipt: Receipt | None = None
    num_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    is_finished: bool = False
    echo: Echo | None = None
    """What the answer shows of the prompt, the same for all its choices; None: nothing."""
    predicted: PredictionCount | None = None
    """What of the request's prediction stands in the answer; None: it has none, or not in the tokens of this answer."""
    trial: Trial | None = None
    """What becomes of the choice at an edge pool that escalates; None: none does, or the prompt's first choice decides
    for this one too."""
    new_probe: Callable[[], Assembler] | None = None
    """Makes an assembler of the answer's text that nobody else uses, for the request's first model; None: there is no
    trial."""


STARTED_AT_ONCE = 4
"""Choices that are started before others get their turn on the event loop: each takes a fraction of a millisecond."""
MOST_QUEUED = 8
"""Sequences of one request that queue for a replica at the same time: far below a tenant's share of the queue."""
RETRY_S = 1.0
"""Pause before a refused sequence queues again, where the refusal names none."""
Prompt = Sequence[Choice]
"""The choices of one prompt, the first one first."""
DeltaListener = Callable[[Delta], bool]
"""A function that takes a delta, or declines it by returning False."""


class Emitter(Protocol):
    """The receiver of the text pieces: a stream of events, or the collector of a whole answer."""

    async def begin(self, choice: Choice) -> None:
        """Take what is shown of the prompt; called before the first piece, where there is any."""

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        """Take one piece. While this waits, nothing more is read of that sequence."""

    def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
        """The fast path of most tokens, from the first piece on: from the replica's frame to the client without waking
        a task.

        The listener does for a delta what `_follow` does, or declines the delta when it would have to wait. None: this
        answer has no fast path.
        """


class AnswerEvents(Emitter, Protocol):
    """An emitter that sends what it takes as events."""

    async def open(self) -> None:
        """Start the response, if it has not started, before it is known who answers."""

    async def end(self, usage: Usage) -> None:
        """Send the end of the stream, once every choice has finished."""


class Completion:
    """All sequences of one request, and what they use. clock: monotonic, seconds. listener: told when sequences wait
    for a first replica."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        dispatcher: Dispatcher,
        clock: Callable[[], float],
        emitter: Emitter,
        listener: HoldListener | None = None,
    ) -> None:
        self._listener = listener
        self.prompts = prompts
        self._dispatcher = dispatcher
        self._clock = clock
        self._emitter = emitter
        self._has_begun = False
        """Whether a first token is there."""
        self._queueing = asyncio.Semaphore(MOST_QUEUED)

    async def run(self) -> None:
        """Run every sequence to its end. Raises what the dispatcher and its streams raise; the other sequences are then
        cancelled."""
        is_search = bool(self.prompts[0][0].generation.sampling.num_beams)
        if len(self.prompts) == 1 and len(self.prompts[0]) == 1 and not is_search:
            await self._follow(self.prompts[0][0])
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for choices in self.prompts:
                    first, *siblings = choices
                    if is_search:
                        tasks.create_task(self._search(choices))
                    else:
                        tasks.create_task(self._follow(first, self._make_starter(tasks, first, siblings)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def usage(self) -> Usage:
        """Tokens so far, as the API reports them."""
        num_prompt = sum(_num_prompt_tokens(choices[0]) for choices in self.prompts)
        num_output = sum(choice.num_tokens for choices in self.prompts for choice in choices)
        num_cached = sum(
            receipt.cached_tokens for choices in self.prompts if (receipt := choices[0].receipt) is not None
        )
        details = _details([choice for choices in self.prompts for choice in choices])
        return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached), details)

    def drop_held(self) -> None:
        """Have nothing counted of what was held back and not decided: the request fails, and nobody saw it."""
        for first, *_ in self.prompts:
            if first.trial is not None:
                first.trial.drop_held()

    def _make_starter(self, tasks: asyncio.TaskGroup, first: Choice, choices: Sequence[Choice]) -> Callable[[], None]:
        """A function that starts these choices, for the first token of their prompt, which is `first`'s."""

        async def start() -> None:
            if first.trial is not None and first.trial.is_away:
                for choice in choices:
                    choice.generation = away_first(choice.generation, first.trial.escalation)
            for number, choice in enumerate(choices, 1):
                tasks.create_task(self._follow(choice))
                if number % STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)

        def start_soon() -> None:
            if choices:
                tasks.create_task(start())

        return start_soon

    async def _follow(self, choice: Choice, on_first: Callable[[], None] | None = None) -> None:
        stream = self._judge(choice, await self._start(choice.generation))
        try:
            choice.receipt = stream.receipt
            listener: DeltaListener | None = None
            while not choice.is_finished:
                delta = await stream.next()
                is_first = choice.first_token_s is None
                if is_first:
                    _adopt_answering_tokenizer(choice, stream.receipt)
                piece = choice.assembler.push(delta)
                self._record(choice, piece, on_first)
                if choice.is_finished:
                    stream.close()  # before a client that may read slowly
                if is_first and choice.echo is not None:
                    await self._begin(choice, delta.prompt_logprobs)
                await self._emitter.emit(choice, piece)
                if listener is None and not choice.is_finished:
                    listener = self._emitter.listener(choice, self._clock)  # once there is one: thinking has none
                    if listener is not None:
                        stream.listen(_counting(listener, choice.predicted))
        finally:
            stream.close()

    def _judge(self, choice: Choice, stream: Stream) -> Stream:
        """The stream, whose beginning is held back where the pool that has it may escalate."""
        trial, new_probe = choice.trial, choice.new_probe
        if trial is None:
            return stream
        assert new_probe is not None
        trial.note_placed(stream.receipt, is_constrained=choice.generation.constraint is not None)
        if trial.outcome is not None or trial.escalation.obstacle is not None:
            return stream

        def take_receipt(receipt: Receipt) -> None:
            choice.receipt = receipt

        return HeldStream(
            stream,
            choice.generation,
            trial,
            lambda receipt: _with_answering_tokenizer(new_probe(), choice.generation, receipt),
            lambda generation: self._dispatcher.start(generation, self._listener),
            take_receipt,
            self._clock,
        )

    async def _start(self, generation: Generation) -> Stream:
        """Raises what `Dispatcher.start` raises, but for being refused by the queue only while no sequence of the
        request has begun; after that until the deadline, when it raises DeadlineExceeded."""
        while True:
            try:
                async with self._queueing:
                    return await self._dispatcher.start(generation, self._listener)
            except (RateLimited, Overloaded) as refusal:
                pause_s = refusal.retry_after_s or RETRY_S
                is_final = isinstance(refusal, CapReached) and pause_s >= generation.deadline - self._clock()
                if is_final or not self._has_begun:
                    raise
            await asyncio.sleep(max(0.0, min(pause_s, generation.deadline - self._clock())))

    async def _search(self, choices: Prompt) -> None:
        """Run a beam search, whose answers come all at once: one for each choice."""
        stream = await self._start(choices[0].generation)
        try:
            choices[0].receipt = stream.receipt
            delta = await stream.next()
            prompt_logprobs = delta.prompt_logprobs
            while delta.finish is None:
                choices[0].num_tokens = max(choices[0].num_tokens, delta.num_beam_tokens)
                delta = await stream.next()
        finally:
            stream.close()
        # the tokens of all beams are the first choice's, but for those that the others show
        choices[0].num_tokens = max(choices[0].num_tokens, delta.num_beam_tokens)
        for choice, beam in zip(choices, delta.beams or (), strict=False):
            choice.receipt = stream.receipt
            _adopt_answering_tokenizer(choice, stream.receipt)
            piece = choice.assembler.push(Delta(delta.sid, beam.token_ids, beam.finish, logprobs=beam.logprobs))
            num_before = choice.num_tokens
            self._record(choice, piece, None)
            choices[0].num_tokens -= choice.num_tokens - num_before
            if choice.echo is not None:
                await self._begin(choice, prompt_logprobs)
            await self._emitter.emit(choice, piece)

    async def _begin(self, choice: Choice, logprobs: PromptLogprobs | None) -> None:
        """Show the prompt, whose log probabilities come with the first delta of its first choice."""
        assert choice.echo is not None
        if logprobs is not None:
            choice.echo.logprobs = logprobs
        await self._emitter.begin(choice)

    def _record(self, choice: Choice, piece: TextPiece, on_first: Callable[[], None] | None) -> None:
        choice.num_tokens += len(piece.token_ids) + piece.num_text_tokens
        if choice.predicted is not None:
            choice.predicted.push(piece.token_ids)
        choice.last_token_s = self._clock()
        choice.is_finished = piece.finish is not None
        if choice.first_token_s is None:
            choice.first_token_s = choice.last_token_s
            self._has_begun = True
            if on_first is not None:
                on_first()


def _adopt_answering_tokenizer(choice: Choice, receipt: Receipt) -> None:
    """Have the text assembled by the tokenizer of the model that answers, which is known once the first token is; the
    prediction is in the tokens of another one."""
    answering = receipt.answering_model
    if answering is None:
        return
    choice.predicted = None
    choice.assembler = _with_answering_tokenizer(choice.assembler, choice.generation, receipt)


def _with_answering_tokenizer(assembler: Assembler, generation: Generation, receipt: Receipt) -> Assembler:
    """The assembler for the model that a receipt names; itself, where that is the generation's own or a provider."""
    answering = receipt.answering_model
    if answering is None or answering.tokenizer is None:
        return assembler
    prompts = (lazy.tokenized for lazy in generation.lazy_prompts if lazy.answering_model is answering)
    packed_prompt = next((prompt.packed_token_ids for prompt in prompts if prompt is not None), b"")
    return assembler.with_tokenizer(answering.tokenizer, packed_prompt)


def _counting(listener: DeltaListener, predicted: PredictionCount | None) -> DeltaListener:
    """The listener, with what it takes counted; itself where there is no prediction."""
    if predicted is None:
        return listener

    def take(delta: Delta) -> bool:
        is_taken = listener(delta)
        if is_taken:
            predicted.push(delta.token_ids)
        return is_taken

    return take


def usage_of(choice: Choice) -> Usage:
    """Tokens of one choice and its prompt so far."""
    num_prompt, num_cached = _num_prompt_tokens(choice), 0 if choice.receipt is None else choice.receipt.cached_tokens
    num_tokens, details = choice.num_tokens, _details([choice])
    return Usage(num_prompt, num_tokens, num_prompt + num_tokens, PromptTokensDetails(num_cached), details)


def _details(choices: Sequence[Choice]) -> CompletionTokensDetails | None:
    """Tokens of these choices that were thinking, and what of their predictions stands in them. Returns None where no
    model thinks and nothing was predicted."""
    thinking = [count for choice in choices if (count := choice.assembler.num_reasoning_tokens) is not None]
    predicted = [choice.predicted for choice in choices if choice.predicted is not None]
    if not thinking and not predicted:
        return None
    return CompletionTokensDetails(
        reasoning_tokens=sum(thinking) if thinking else None,
        accepted_prediction_tokens=sum(count.num_accepted for count in predicted) if predicted else None,
        rejected_prediction_tokens=sum(count.num_rejected for count in predicted) if predicted else None,
    )


def _num_prompt_tokens(choice: Choice) -> int:
    """Prompt tokens as the answering model or provider counts them, or else as the first model's tokenizer does."""
    counted = None if choice.receipt is None else choice.receipt.num_prompt_tokens
    return choice.generation.num_prompt_tokens if counted is None else counted


class Collector:
    """Emitter of an answer that leaves as a whole."""

    def __init__(self) -> None:
        self._collected: dict[int, _Collected] = {}

    async def begin(self, choice: Choice) -> None:
        self._collected[choice.index] = _Collected(FinishedChoice(choice.index, echo=choice.echo))

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        collected = self._collected.get(choice.index)
        if collected is None:
            collected = self._collected[choice.index] = _Collected(FinishedChoice(choice.index))
        collected.add(piece)

    def listener(self, choice: Choice, clock: Callable[[], float]) -> DeltaListener | None:
        if not choice.assembler.is_plain:
            return None
        add, push = self._collected[choice.index].add, choice.assembler.push

        def take(delta: Delta) -> bool:
            add(push(delta))
            choice.num_tokens += len(delta.token_ids)
            choice.last_token_s = clock()
            return True

        return take

    def choices(self) -> Iterator[FinishedChoice]:
        """Finished choices in the order of their indices, each put together when it is asked for."""
        return (self._collected[index].finish() for index in sorted(self._collected))


class _Collected:
    """What there is of one choice."""

    __slots__ = ("_arguments", "_choice", "_reasoning", "_texts")

    def __init__(self, choice: FinishedChoice) -> None:
        self._choice = choice
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []
        """Parts of each call's arguments."""

    def add(self, piece: TextPiece) -> None:
        choice = self._choice
        if piece.text:
            self._texts.append(piece.text)
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
        choice.token_ids += piece.token_ids
        if piece.logprobs:
            choice.logprobs += piece.logprobs
        if piece.offsets:
            choice.offsets += piece.offsets
        if piece.calls:
            self._add_calls(piece.calls)
        if piece.finish is not None:
            choice.finish, choice.stop_string = piece.finish, piece.stop_string

    def finish(self) -> FinishedChoice:
        self._choice.text, self._choice.reasoning = "".join(self._texts), "".join(self._reasoning)
        for call, arguments in zip(self._choice.calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        return self._choice

    def _add_calls(self, calls: Sequence[CallDelta]) -> None:
        """Add parts of calls, each of which begins behind the one before."""
        for call in calls:
            if call.number == len(self._arguments):
                self._choice.calls.append(FinishedCall(call.id or "", call.name or ""))
                self._arguments.append([])
            self._arguments[call.number].append(call.arguments)
