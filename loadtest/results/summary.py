"""The figures of a run, from its records: exact percentiles, rates, goodput with the cause of every miss, lateness, and
the same per group.

Not here: figures over time (`series.py`). Requests intended before the scenario's `warmup_s` are left out of
everything.
"""

from collections.abc import Iterable

import msgspec
import numpy as np

from penstock_loadtest.results.columns import (
    OUTCOMES,
    Columns,
    ErrorKey,
    Floats,
    Label,
    Mask,
    Sample,
    measure_token_gaps,
    read_columns,
)
from penstock_loadtest.results.records import Outcome, Record
from penstock_loadtest.scenario import Scenario, Targets

MAX_LATENESS_S = 0.010
"""A run whose p99 lateness exceeds it measured the tester along with the server."""
TOP_ERRORS = 10
_RESOLUTION_S = 5e-7  # records are to the microsecond: half of it is rounding


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles over the requests (inter-token: the gaps) that have the figure; None where `count` is 0."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    finished: int = 0
    cancelled: int = 0
    shed: int = 0
    failed: int = 0
    unfinished: int = 0


class Misses(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are not goodput, each under one cause: how it ended, else TTFT, else TPOT."""

    ttft: int = 0  # over target, also when we hung up after it; finished without a token
    tpot: int = 0  # over target, TTFT was not
    failed: int = 0
    shed: int = 0
    unfinished: int = 0


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    judged: int = 0  # requests but those that we cancelled in time
    good: int = 0  # finished, TTFT and TPOT within the targets
    share: float | None = None  # good / judged
    per_s: float | None = None  # good requests a second
    misses: Misses = Misses()


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between intended and actual sending."""

    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None
    is_late: bool = False  # p99 over MAX_LATENESS_S


class TokenSources(msgspec.Struct, frozen=True, kw_only=True):
    """Delivered tokens by how they were counted; only `ids` are verified."""

    ids: int = 0
    usage: int = 0
    chunks: int = 0


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    status: int | None
    sentence: str
    count: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The main figures of the requests that share a label."""

    name: str | None  # None: the server did not report it
    requests: int
    outcomes: Outcomes
    goodput: Goodput
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    output_tokens: int
    output_tokens_per_s: float | None
    hit_rate: float | None


class GroupSummaries(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of each label, largest first."""

    tenant: list[Group]
    kind: list[Group]
    model: list[Group]
    endpoint: list[Group]
    tier: list[Group]
    replica: list[Group]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the scenario
    requests: int
    warmup_requests: int  # left out
    outcomes: Outcomes
    # first intended time to the last token or finished answer, over which achieved rate and throughput are taken;
    # None: no time passed
    span_s: float | None
    offered_rate: float | None  # requests a second between the first and the last intended time
    achieved_rate: float | None  # finished requests a second
    ttft_s: Distribution
    tpot_s: Distribution
    inter_token_s: Distribution
    e2e_s: Distribution
    goodput: Goodput
    output_tokens: int  # delivered, whatever became of their request
    output_tokens_per_s: float | None
    prompt_tokens: int  # where the server reports them
    prompt_tokens_per_s: float | None
    hit_rate: float | None  # cached / prompt tokens, of the requests that have both; None: the server reports none
    shared_chunk_share: float | None  # of delivered tokens: came with others in one chunk, so their time is the chunk's
    token_sources: TokenSources
    lateness: Lateness
    errors: list[Errors]  # the TOP_ERRORS commonest
    other_errors: int  # requests with any other error
    groups: GroupSummaries


def summarize(records: Iterable[Record], scenario: Scenario) -> Summary:
    """The summary of records, in one pass; takes about 1.5 kB of memory a request with 64 chunks."""
    return summarize_columns(read_columns(records, warmup_s=scenario.warmup_s), scenario)


def summarize_columns(columns: Columns, scenario: Scenario) -> Summary:
    everyone = np.ones(len(columns), dtype=np.bool_)
    span_s = _span_s(columns)
    good, causes = judge(columns, scenario.targets)
    prompt_tokens = int(np.nansum(columns.prompt_tokens))
    output_tokens = int(columns.tokens.sum())
    common = columns.errors.most_common(TOP_ERRORS)

    def groups(label: str) -> list[Group]:
        return _groups(columns, columns.labels[label], good, causes, span_s)

    return Summary(
        name=scenario.name,
        requests=len(columns),
        warmup_requests=columns.warmup,
        outcomes=_outcomes(columns, everyone),
        span_s=span_s,
        offered_rate=_offered_rate(columns.intended_s),
        achieved_rate=_per_s(int(columns.is_outcome("finished").sum()), span_s),
        ttft_s=_distribution(Sample(columns.ttft_s)),
        tpot_s=_distribution(Sample(columns.tpot_s)),
        inter_token_s=_distribution(measure_token_gaps(columns)),
        e2e_s=_distribution(Sample(columns.e2e_s)),
        goodput=_goodput(good, causes, everyone, span_s),
        output_tokens=output_tokens,
        output_tokens_per_s=_per_s(output_tokens, span_s),
        prompt_tokens=prompt_tokens,
        prompt_tokens_per_s=_per_s(prompt_tokens, span_s),
        hit_rate=_hit_rate(columns, everyone),
        shared_chunk_share=_shared_chunk_share(columns),
        token_sources=_token_sources(columns),
        lateness=_lateness(Sample(columns.lateness_s)),
        errors=[_errors(key, count) for key, count in common],
        other_errors=columns.errors.total() - sum(count for _, count in common),
        groups=GroupSummaries(**{label: groups(label) for label in GroupSummaries.__struct_fields__}),
    )


def judge(columns: Columns, targets: Targets) -> tuple[Mask, dict[str, Mask]]:
    """Requests that are good, and which are a miss for which cause (a field of Misses); those in neither were
    cancelled in time."""
    finished, cancelled = columns.is_outcome("finished"), columns.is_outcome("cancelled")
    # no first token yet when we hung up: the wait until then is the least that TTFT would have been
    waited_s = np.where(np.isnan(columns.first_s) & cancelled, columns.end_s - columns.intended_s, columns.ttft_s)
    # a whole answer has as long as its first and further tokens may take together
    is_answer = columns.is_whole & finished & (columns.tokens > 0)
    waited_s = np.where(is_answer, columns.e2e_s - targets.tpot_s * np.maximum(columns.tokens - 1, 0), waited_s)
    is_slow = waited_s > targets.ttft_s + _RESOLUTION_S
    misses_ttft = (finished & (is_slow | np.isnan(waited_s))) | (cancelled & is_slow)
    misses_tpot = finished & ~misses_ttft & (columns.tpot_s > targets.tpot_s + _RESOLUTION_S)
    causes = {"ttft": misses_ttft, "tpot": misses_tpot}
    for outcome in ("failed", "shed", "unfinished"):
        causes[outcome] = columns.outcome == OUTCOMES.index(outcome)
    return finished & ~misses_ttft & ~misses_tpot, causes


def _goodput(good: Mask, causes: dict[str, Mask], among: Mask, span_s: float | None) -> Goodput:
    misses = Misses(**{cause: int((mask & among).sum()) for cause, mask in causes.items()})
    count = int((good & among).sum())
    judged = count + sum(msgspec.structs.astuple(misses))
    return Goodput(
        judged=judged, good=count, share=count / judged if judged else None, per_s=_per_s(count, span_s), misses=misses
    )


def _groups(columns: Columns, label: Label, good: Mask, causes: dict[str, Mask], span_s: float | None) -> list[Group]:
    groups = []
    for code, name in enumerate(label.names):
        among = label.codes == code
        tokens = int(columns.tokens[among].sum())
        groups.append(
            Group(
                name=name,
                requests=int(among.sum()),
                outcomes=_outcomes(columns, among),
                goodput=_goodput(good, causes, among, span_s),
                ttft_s=_distribution(Sample(columns.ttft_s[among])),
                tpot_s=_distribution(Sample(columns.tpot_s[among])),
                e2e_s=_distribution(Sample(columns.e2e_s[among])),
                output_tokens=tokens,
                output_tokens_per_s=_per_s(tokens, span_s),
                hit_rate=_hit_rate(columns, among),
            )
        )
    return sorted(groups, key=lambda group: (-group.requests, group.name or ""))


def _distribution(sample: Sample) -> Distribution:
    if not len(sample):
        return Distribution()
    p50, p90, p99 = sample.quantiles(np.array([0.5, 0.9, 0.99])).tolist()
    return Distribution(count=len(sample), mean=sample.mean, p50=p50, p90=p90, p99=p99, max=sample.max)


def _lateness(sample: Sample) -> Lateness:
    figures = _distribution(sample)
    return Lateness(
        p50_s=figures.p50,
        p99_s=figures.p99,
        max_s=figures.max,
        is_late=figures.p99 is not None and figures.p99 > MAX_LATENESS_S,
    )


def _outcomes(columns: Columns, among: Mask) -> Outcomes:
    return Outcomes(**{outcome: int((columns.is_outcome(outcome) & among).sum()) for outcome in OUTCOMES})


def _span_s(columns: Columns) -> float | None:
    """Seconds from the first intended time to the last token or finished answer. Requests that hang until their timeout
    don't prolong it: that would dilute the rates of those that were served."""
    served = np.concatenate([columns.end_s[columns.is_outcome("finished")], columns.chunk_s])
    ends = served if len(served) else columns.end_s
    if np.isnan(ends).all():
        return None
    return float(np.nanmax(ends) - columns.intended_s.min()) or None


def _offered_rate(intended_s: Floats) -> float | None:
    return _per_s(len(intended_s) - 1, float(np.ptp(intended_s))) if len(intended_s) > 1 else None


def _per_s(count: int, span_s: float | None) -> float | None:
    return count / span_s if span_s else None


def _hit_rate(columns: Columns, among: Mask) -> float | None:
    reported = among & ~np.isnan(columns.prompt_tokens) & ~np.isnan(columns.cached_tokens)
    prompt = float(columns.prompt_tokens[reported].sum())
    return float(columns.cached_tokens[reported].sum()) / prompt if prompt else None


def _shared_chunk_share(columns: Columns) -> float | None:
    tokens = columns.streamed_chunk_tokens
    total = int(tokens.sum())
    return int(tokens[tokens > 1].sum()) / total if total else None


def _token_sources(columns: Columns) -> TokenSources:
    ids, usage, chunks = np.bincount(columns.source, weights=columns.tokens, minlength=3).astype(int).tolist()
    return TokenSources(ids=ids, usage=usage, chunks=chunks)


def _errors(key: ErrorKey, count: int) -> Errors:
    return Errors(outcome=key.outcome, status=key.status, sentence=key.sentence, count=count)
