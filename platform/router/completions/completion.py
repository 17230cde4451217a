"""The sequences of one request: started, followed to their ends, and closed whatever happens.

Not HTTP. The siblings of a prompt's first choice (`n` > 1) start when its first token is there: by then the prompt's
blocks are published, and they find their whole prefix. Invariant: when `run` is over, however it ends, every stream is
closed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.router.completions.formats import Whole
from penstock.router.completions.text_assembly import Assembler, Piece
from penstock.router.routing.request import Dispatcher, Generation, Receipt
from penstock.wire.frames import Delta
from penstock.wire.openai import PromptTokensDetails, Usage


@dataclass(slots=True)
class Choice:
    """One sequence, and what is known of it so far. Times are of the monotonic clock that `run` was given."""

    index: int
    generation: Generation
    assembler: Assembler
    receipt: Receipt | None = None
    num_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    is_finished: bool = False


Prompt = Sequence[Choice]
"""The choices of one prompt, the first one first."""
Listener = Callable[[Delta], bool]


class Emitter(Protocol):
    """Where the pieces go."""

    async def emit(self, choice: Choice, piece: Piece) -> None:
        """While it waits, nothing more is read of that sequence."""

    def listener(self, choice: Choice, clock: Callable[[], float]) -> Listener | None:
        """The short way of a token, taken by most, behind the first piece: from the replica's frame to the client
        without waking a task.

        It does for a delta what `_follow` does, or declines it when it would have to wait. None: this answer has no
        short way.
        """


class Completion:
    """clock: monotonic seconds."""

    def __init__(
        self, prompts: Sequence[Prompt], dispatcher: Dispatcher, clock: Callable[[], float], emitter: Emitter
    ) -> None:
        self.prompts = prompts
        self._dispatcher = dispatcher
        self._clock = clock
        self._emitter = emitter

    async def run(self) -> None:
        """Raises what the dispatcher and its streams raise; the other sequences are then cancelled."""
        if len(self.prompts) == 1 and len(self.prompts[0]) == 1:
            await self._follow(self.prompts[0][0])
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for first, *siblings in self.prompts:
                    tasks.create_task(self._follow(first, self._starter(tasks, siblings)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def usage(self) -> Usage:
        num_prompt = sum(_num_prompt_tokens(choices[0]) for choices in self.prompts)
        num_output = sum(choice.num_tokens for choices in self.prompts for choice in choices)
        num_cached = sum(
            receipt.cached_tokens for choices in self.prompts if (receipt := choices[0].receipt) is not None
        )
        return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))

    def _starter(self, tasks: asyncio.TaskGroup, choices: Sequence[Choice]) -> Callable[[], None]:
        def start() -> None:
            for choice in choices:
                tasks.create_task(self._follow(choice))

        return start

    async def _follow(self, choice: Choice, on_first: Callable[[], None] | None = None) -> None:
        stream = await self._dispatcher.start(choice.generation)
        try:
            choice.receipt = stream.receipt
            is_listening = False
            while not choice.is_finished:
                delta = await stream.next()
                if choice.first_token_s is None:
                    _suit(choice, stream.receipt)
                piece = choice.assembler.push(delta)
                self._note(choice, piece, on_first)
                if choice.is_finished:
                    stream.close()  # before a client that may read slowly
                await self._emitter.emit(choice, piece)
                if not is_listening and not choice.is_finished:
                    is_listening = True
                    listener = self._emitter.listener(choice, self._clock)
                    if listener is not None:
                        stream.listen(listener)
        finally:
            stream.close()

    def _note(self, choice: Choice, piece: Piece, on_first: Callable[[], None] | None) -> None:
        choice.num_tokens += len(piece.token_ids) + piece.num_text_tokens
        choice.last_token_s = self._clock()
        choice.is_finished = piece.finish is not None
        if choice.first_token_s is None:
            choice.first_token_s = choice.last_token_s
            if on_first is not None:
                on_first()


def _suit(choice: Choice, receipt: Receipt) -> None:
    """By the first token it is known who answers; another model's tokens are another tokenizer's."""
    if receipt.answering_model is not None and receipt.answering_model.tokenizer is not None:
        choice.assembler = choice.assembler.over(receipt.answering_model.tokenizer)


def _num_prompt_tokens(choice: Choice) -> int:
    """As whoever answers counts."""
    counted = None if choice.receipt is None else choice.receipt.num_prompt_tokens
    return choice.generation.num_prompt_tokens if counted is None else counted


class Collector:
    """Emits into whole answers."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Piece]] = {}

    async def emit(self, choice: Choice, piece: Piece) -> None:
        self._parts.setdefault(choice.index, []).append(piece)

    def listener(self, choice: Choice, clock: Callable[[], float]) -> Listener | None:
        if not choice.assembler.is_plain:
            return None
        parts, push = self._parts[choice.index], choice.assembler.push

        def take(delta: Delta) -> bool:
            parts.append(push(delta))
            choice.num_tokens += len(delta.token_ids)
            choice.last_token_s = clock()
            return True

        return take

    def choices(self) -> list[Whole]:
        """In the order of their indices."""
        return [_whole(index, self._parts[index]) for index in sorted(self._parts)]


def _whole(index: int, pieces: Sequence[Piece]) -> Whole:
    whole = Whole(index, "".join([piece.text for piece in pieces]), pieces[-1].finish or "stop")
    for piece in pieces:
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs or ()
        whole.offsets += piece.offsets
    return whole
