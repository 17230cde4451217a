"""A scenario's requests, one after another: the same seed gives the same plan, however much of it is drawn.

Lazy: a request's text exists from when it is drawn. Times, kinds, tenants, models, lengths, texts and hang-ups come
from random streams of their own, so a further tenant changes whose requests they are and nothing else.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, repeat, takewhile
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from penstock_loadtest.planned import Planned
from penstock_loadtest.scenario import Cancel, Prompts, Scenario
from penstock_loadtest.workload.arrivals import draw_arrival_times
from penstock_loadtest.workload.kinds import DrawnTurn, KindDraws, Texts, hash_name
from penstock_loadtest.workload.lengths import draw
from penstock_loadtest.workload.text import TextMaker
from penstock_loadtest.workload.trace_row import TraceRow
from penstock_loadtest.workload.traces import read_trace

T = TypeVar("T")


MakeTexts = Callable[[Prompts, int], Texts]
"""Makes the texts of one kind of request, from its settings and a seed."""


def draw_plan(scenario: Scenario, make_texts: MakeTexts = TextMaker) -> Iterator[Planned]:
    """The requests of a scenario in the order of at_s. The turns of a session come right after its first one, at the
    same at_s: their time depends on answers that are not there yet.

    Ends with the scenario's requests, its duration (arrivals; later turns may leave behind it) or its trace. In the
    closed loop every at_s is 0 and the duration ends nothing: the runner knows when it is over. make_texts: another
    maker of texts, for those who need no real ones. Raises ScenarioInvalid and TraceInvalid, most of them before the
    first request.
    """
    streams = _Streams.of(scenario.seed)
    draws = _Draws(scenario, streams, make_texts)
    index = 0
    for arrival, (at_s, row) in enumerate(_arrivals(scenario, streams)):
        room = None if scenario.requests is None else scenario.requests - index
        for planned in draws.requests(index, arrival, at_s, row, room):
            yield planned
            index += 1
        if index == scenario.requests:
            return


class _Streams(NamedTuple):
    """Independent seeds, by concern. New ones go last: the others stay what they are."""

    times: np.random.SeedSequence
    kinds: np.random.SeedSequence
    tenants: np.random.SeedSequence
    models: np.random.SeedSequence
    cancels: np.random.SeedSequence
    texts: np.random.SeedSequence
    contents: np.random.SeedSequence

    @classmethod
    def of(cls, seed: int) -> "_Streams":
        return cls(*np.random.SeedSequence(seed).spawn(len(cls._fields)))


class _Arrival(NamedTuple):
    at_s: float
    row: TraceRow | None


def _arrivals(scenario: Scenario, streams: _Streams) -> Iterator[_Arrival]:
    is_open = scenario.loop == "open"
    if scenario.trace is not None:
        rows = read_trace(scenario.trace, _number(streams.times))
        drawn = (_Arrival(row.at_s if is_open else 0.0, row) for row in rows)
    elif is_open:
        times = draw_arrival_times(scenario.arrivals, scenario.duration_s, np.random.default_rng(streams.times))
        drawn = (_Arrival(at_s, None) for at_s in times)
    else:
        return repeat(_Arrival(0.0, None))
    end_s = scenario.duration_s
    return drawn if end_s is None else takewhile(lambda arrival: arrival.at_s < end_s, drawn)


class _Draws:
    def __init__(self, scenario: Scenario, streams: _Streams, make_texts: MakeTexts) -> None:
        text_seed, corpus_rows = _number(streams.texts), count()
        kinds = [
            KindDraws(kind, place, seeds, make_texts(kind.prompts, text_seed), corpus_rows)
            for place, (kind, seeds) in enumerate(
                zip(scenario.kinds, streams.contents.spawn(len(scenario.kinds)), strict=True)
            )
        ]
        models: dict[str | None, float] = {model.name: model.weight for model in scenario.models} or {None: 1.0}
        self._kinds = _Weighted(kinds, [kind.weight for kind in scenario.kinds], streams.kinds)
        self._tenants = _Weighted(
            [tenant.name for tenant in scenario.tenants],
            [tenant.weight for tenant in scenario.tenants],
            streams.tenants,
        )
        self._models = _Weighted(list(models), list(models.values()), streams.models)
        self._cancels = _Cancels(scenario.cancel, streams.cancels)

    def requests(
        self, index: int, arrival: int, at_s: float, row: TraceRow | None, room: int | None
    ) -> Iterator[Planned]:
        """One request, or the turns of one session, at most `room`. In a trace, what belongs to one session or client
        stays with one tenant."""
        session, client = (row.session, row.client or row.session) if row is not None else (None, None)
        draws, tenant, model = self._kinds.pick(session), self._tenants.pick(client), self._models.pick(session)
        kind = draws.kind
        drawn: Iterator[DrawnTurn]
        if row is None:
            turns = draws.draw_turn_count()
            turns = turns if room is None else min(turns, room)
            drawn = draws.draw_turns(arrival, turns)
        else:
            turns, drawn = 1, iter((draws.draw_replay(arrival, row),))
        for turn, content in enumerate(drawn):
            yield Planned(
                index=index + turn,
                at_s=at_s,
                endpoint=kind.endpoint,
                prompt=content.prompt,
                system=content.system,
                max_tokens=content.max_tokens,
                ignore_eos=kind.ignore_eos,
                temperature=kind.temperature,
                seed=content.seed,
                stream=kind.stream,
                tenant=tenant,
                kind=kind.name,
                model=model,
                cancel_after_s=self._cancels.draw(),
                session=None if kind.sessions is None else f"{arrival}",
                turn=turn,
                is_last_turn=turn == turns - 1,
                think_s=content.think_s,
            )


class _Weighted(Generic[T]):
    """Picks items in proportion to their weights, of which one is above 0; one draw a pick, whatever the weights."""

    def __init__(self, items: Sequence[T], weights: Sequence[float], seeds: np.random.SeedSequence) -> None:
        self._items = items
        self._bounds = list(accumulate(weights))
        self._last = self._bounds.index(self._bounds[-1])  # what follows has no weight
        self._rng = np.random.default_rng(seeds)
        self._salt = _number(seeds)

    def pick(self, owner: str | None = None) -> T:
        """The same item for the same owner."""
        drawn = self._rng.random()
        share = drawn if owner is None else hash_name(f"{self._salt} {owner}") / 2**64
        return self._items[bisect_right(self._bounds, share * self._bounds[-1], hi=self._last)]


class _Cancels:
    def __init__(self, cancel: Cancel, seeds: np.random.SeedSequence) -> None:
        self._cancel = cancel
        self._which, self._when = map(np.random.default_rng, seeds.spawn(2))

    def draw(self) -> float | None:
        """Draw the seconds after which the next request hangs up. Returns None if it does not hang up."""
        return draw(self._cancel.after_s, self._when) if self._which.random() < self._cancel.share else None


def _number(seeds: np.random.SeedSequence) -> int:
    return int(seeds.generate_state(1, np.uint64)[0])
