"""Contents of the requests of one kind: prompts, lengths of answers, turns.

Each concern draws from a generator of its own, so that a change of one (such as longer answers) leaves the others as
they were.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import numpy as np

from penstock_loadtest.planned import Prompt
from penstock_loadtest.scenario import Kind
from penstock_loadtest.workload.lengths import draw, draw_tokens
from penstock_loadtest.workload.trace_row import TraceRow

PREFIX: Final = 1
SYSTEM: Final = 2
OWN: Final = 3
SESSION: Final = 4
"""Purposes of a text: a part of its key, so that no two texts are equal by chance."""


class Texts(Protocol):
    """The maker of a kind's texts; `penstock_loadtest.workload.text.TextMaker` makes real ones."""

    def tokens(self, count: int, *key: int) -> list[int]: ...
    def words(self, count: int, *key: int) -> str: ...
    def block_tokens(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> list[int]: ...
    def block_words(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> str: ...
    def corpus(self, index: int, count: int) -> list[str]: ...


class DrawnTurn(NamedTuple):
    """One turn of a session, or a request without one, as it was drawn."""

    prompt: Prompt
    max_tokens: int
    seed: int | None
    think_s: float
    system: str | None


class KindDraws:
    """Draws the requests of one kind. corpus_rows: numbers of the corpus's rows, shared by all kinds, so that none is
    sent twice before all were."""

    def __init__(
        self, kind: Kind, place: int, seeds: np.random.SeedSequence, texts: Texts, corpus_rows: Iterator[int]
    ) -> None:
        self.kind = kind
        self._place = place
        self._texts = texts
        self._corpus_rows = corpus_rows
        self._turns, self._thinking, self._prompts, self._outputs, self._groups, self._seeds = map(
            np.random.default_rng, seeds.spawn(6)
        )
        system_tokens = kind.sessions.system_tokens if kind.sessions is not None else 0
        self._system = texts.words(system_tokens, place, SYSTEM) if system_tokens else None

    def draw_turn_count(self) -> int:
        return draw_tokens(self.kind.sessions.turns, self._turns) if self.kind.sessions is not None else 1

    def draw_turns(self, arrival: int, turns: int) -> Iterator[DrawnTurn]:
        """The turns of the arrival-th request or session of the plan; to be drawn to the end before the next one's."""
        corpus: list[str] = []
        for turn in range(turns):
            count = draw_tokens(self.kind.prompts.tokens, self._prompts)
            if self.kind.prompts.source == "corpus":
                corpus = corpus or self._texts.corpus(next(self._corpus_rows), count)[:]
                text: Prompt = corpus.pop(0)
            else:
                own = max(1, count - self.kind.prompts.shared_prefix_tokens) if turn == 0 else count
                text = self._make(own, OWN, arrival, turn)
            think_s = (
                draw(self.kind.sessions.think_s, self._thinking) if self.kind.sessions is not None and turn else 0.0
            )
            yield DrawnTurn(
                prompt=text if turn else self._with_prefix(text),
                max_tokens=draw_tokens(self.kind.output_tokens, self._outputs),
                seed=self._draw_seed(),
                think_s=think_s,
                system=None if turn else self._system,
            )

    def draw_replay(self, arrival: int, row: TraceRow) -> DrawnTurn:
        """A trace's request: with its lengths, and with the leading tokens that others have too.

        Requests of one session of a trace without hash_ids begin alike as far as both go: each carries the conversation
        so far.
        """
        count, source, shared = row.prompt_tokens, self.kind.prompts.source, self.kind.prompts.shared_prefix_tokens
        text: Prompt
        if row.hash_ids is not None:
            make = self._texts.block_tokens if source == "tokens" else self._texts.block_words
            text = make(row.hash_ids, row.block_tokens, count)
        elif source == "corpus":
            text = self._with_prefix(self._texts.corpus(next(self._corpus_rows), count)[0])
        elif row.session is not None:
            text = self._make(count, SESSION, hash_name(row.session))
        else:
            text = self._with_prefix(self._make(max(1, count - shared), OWN, arrival))
        return DrawnTurn(prompt=text, max_tokens=row.output_tokens, seed=self._draw_seed(), think_s=0.0, system=None)

    def _make(self, count: int, *key: int) -> Prompt:
        make = self._texts.tokens if self.kind.prompts.source == "tokens" else self._texts.words
        return make(count, self._place, *key)

    def _with_prefix(self, text: Prompt) -> Prompt:
        prompts = self.kind.prompts
        if not prompts.shared_prefix_tokens:
            return text
        prefix = self._make(prompts.shared_prefix_tokens, PREFIX, int(self._groups.integers(prompts.prefix_groups)))
        if isinstance(prefix, list):
            return [*prefix, *text]
        return f"{prefix} {text}"

    def _draw_seed(self) -> int | None:
        return int(self._seeds.integers(1 << 31)) if self.kind.seeded and self.kind.temperature > 0 else None


def hash_name(name: str) -> int:
    """64 bits that stand for a name, in every process the same."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
