"""The ledger of a run, kept from outside: did each accepted request end once, was what came what was metered, are
repeated answers the same.

Pure: records in, findings out. A request is accepted when a response with status 200 began. `Record.violations` (what
the protocol forbids, as the client saw it) are taken over as kinds of their own; everything else is concluded here.
Only tokens counted by their ids are verified: tokens by usage are the server's own figure, chunks a guess, and both are
counted apart.

What a tenant's meter should show is known exactly for requests that finished or were declined. Of one that ended
otherwise (we hung up, it broke) the server may have made more tokens than came here, up to max_tokens, so the sum
has a lower and an upper bound.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock_loadtest.results.records import Outcome, Record, TokenCount

MAX_EXAMPLES = 5

NO_FINISH_REASON = "finished without a finish_reason"
NOT_ENDED = "accepted, and neither ended nor was cut by us"
RECORDED_TWICE = "recorded twice under one index"
TOKENS_DIFFER = "delivered tokens are not the metered ones"
METERED_LESS = "hung up on with more tokens delivered than metered"
TOO_MANY = "more tokens than asked for"
ANSWERS_DIFFER = "repeated, and the answers differ"
TENANT_DIFFERS = "a tenant's meter is not what was delivered"

_COUNTED_BY: dict[TokenCount, str] = {"ids": "verified", "usage": "by_usage", "chunks": "by_chunks"}


class Repeat(msgspec.Struct, frozen=True):
    """A seeded or greedy request that was sent twice."""

    first: Record
    second: Record

    @property
    def is_comparable(self) -> bool:
        """Both finished with an answer to compare."""
        return all(run.outcome == "finished" and run.answer_digest is not None for run in (self.first, self.second))

    @property
    def is_same(self) -> bool:
        return self.first.answer_digest == self.second.answer_digest


class Example(msgspec.Struct, frozen=True):
    """A request that shows the violation."""

    index: int
    request_id: str | None


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    count: int
    examples: list[Example]  # the first MAX_EXAMPLES


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens of requests, by how far they are checked."""

    verified: int = 0  # delivered, counted by id
    by_usage: int = 0  # delivered, by the server's own figure
    by_chunks: int = 0  # delivered, one assumed per chunk
    matched: int = 0  # of the verified: equal to the usage of the same request
    unmetered: int = 0  # of the verified: their request's usage never came


class TenantTotals(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    requests: int
    accepted: int
    prompt_tokens: int  # where the server reports them
    cached_tokens: int  # where the server reports them
    completion_tokens: int  # delivered, however counted
    usage_tokens: int  # sum of the completion tokens of usage
    least_metered: int  # what a meter must show at least
    most_metered: int | None  # and at most; None: a request without max_tokens was cut short
    metered: int | None  # what the tenant's meter shows; None: not read


class Repeats(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the answers to seeded or greedy requests that were sent twice."""

    compared: int = 0
    different: int = 0
    not_compared: int = 0  # one of the two did not finish, or there was nothing to compare
    share: float | None = None  # different / compared
    is_fatal: bool = False  # the server calls itself exact, so a difference is a violation


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    is_balanced: bool  # no violation
    requests: int
    accepted: int
    ends: dict[Outcome, int]  # of the accepted
    tokens: Tokens
    violations: list[Violation]  # commonest first
    repeats: Repeats
    tenants: list[TenantTotals]  # by name
    sentences: list[str]  # the same for people, the verdict first


class _Account:
    """What a tenant's meter may show, summed up request by request."""

    def __init__(self) -> None:
        self.requests = self.accepted = self.prompt = self.cached = self.completion = self.usage = self.least = 0
        self.most: int | None = 0

    def add(self, record: Record) -> None:
        self.requests += 1
        self.accepted += record.status == 200
        self.prompt += record.prompt_tokens or 0
        self.cached += record.cached_tokens or 0
        self.completion += record.tokens
        self.usage += record.metered_tokens or 0
        least, most = bound_metered_tokens(record)
        self.least += least
        self.most = None if self.most is None or most is None else self.most + most

    def totals(self, tenant: str, metered: int | None) -> TenantTotals:
        return TenantTotals(
            tenant=tenant,
            requests=self.requests,
            accepted=self.accepted,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            completion_tokens=self.completion,
            usage_tokens=self.usage,
            least_metered=self.least,
            most_metered=self.most,
            metered=metered,
        )


class _Findings:
    """Violations by kind, with the first few examples of each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[Example]] = {}

    def add(self, kind: str, record: Record | None = None) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        examples = self._examples.setdefault(kind, [])
        if record is not None and len(examples) < MAX_EXAMPLES:
            examples.append(Example(record.index, record.request_id))

    def violations(self) -> list[Violation]:
        by_count = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        return [Violation(kind=kind, count=count, examples=self._examples[kind]) for kind, count in by_count]


def bound_metered_tokens(record: Record) -> tuple[int, int | None]:
    """The fewest and the most completion tokens that a meter may show for a request; most is None where nothing bounds
    it."""
    if record.outcome == "shed" or record.sent_s is None or (record.status is not None and record.status != 200):
        return 0, 0
    delivered = record.tokens if record.tokens_from != "chunks" else record.metered_tokens
    if record.outcome == "finished" and delivered is not None:
        return delivered, delivered
    least = record.tokens if record.tokens_from == "ids" else 0
    return least, None if record.wanted_tokens is None else max(least, record.wanted_tokens)


def find_violations(record: Record) -> list[str]:
    """What is wrong with how one request ended; nothing can be with one that was not accepted."""
    if record.status != 200:
        return []
    found = list(dict.fromkeys(record.violations))
    if record.outcome == "unfinished" and not record.is_cut:
        found.append(NOT_ENDED)
    if record.outcome == "finished" and record.finish_reason is None:
        found.append(NO_FINISH_REASON)
    if record.wanted_tokens is not None and record.tokens_from != "chunks" and record.tokens > record.wanted_tokens:
        found.append(TOO_MANY)
    return found + _metering_violations(record)


def _metering_violations(record: Record) -> list[str]:
    if record.tokens_from != "ids" or record.metered_tokens is None:
        return []
    if record.outcome == "finished" and record.tokens != record.metered_tokens:
        return [TOKENS_DIFFER]
    return [METERED_LESS] if record.tokens > record.metered_tokens else []


class _OpenLedger:
    """A ledger in the making: what is summed up request by request."""

    def __init__(self) -> None:
        self.findings = _Findings()
        self.accounts: dict[str, _Account] = {}
        self.tokens = dict.fromkeys(Tokens.__struct_fields__, 0)
        self.ends: dict[Outcome, int] = {}
        self._indexes: set[int] = set()

    def add(self, record: Record) -> None:
        self.accounts.setdefault(record.tenant, _Account()).add(record)
        for kind in find_violations(record):
            self.findings.add(kind, record)
        if record.index in self._indexes:
            self.findings.add(RECORDED_TWICE, record)
        self._indexes.add(record.index)
        if record.status == 200:
            self.ends[record.outcome] = self.ends.get(record.outcome, 0) + 1
            self._count(record)

    def _count(self, record: Record) -> None:
        self.tokens[_COUNTED_BY[record.tokens_from]] += record.tokens
        if record.tokens_from == "ids" and record.metered_tokens is None:
            self.tokens["unmetered"] += record.tokens
        elif record.tokens_from == "ids" and record.tokens == record.metered_tokens:
            self.tokens["matched"] += record.tokens


def check_ledger(
    records: Iterable[Record],
    repeats: Sequence[Repeat] = (),
    *,
    exact: bool | None,
    metered: Mapping[str, int] | None = None,
) -> Ledger:
    """The ledger of all requests of a run, warm-up included, in one pass.

    `exact`: whether the server calls itself exact; only True makes a differing repeat a violation. `metered`:
    completion tokens by tenant, as an account of the server's that covers exactly these records shows them. `repeats`
    are compared only: a second answer that should be accounted for belongs in `records`.
    """
    ledger = _OpenLedger()
    for record in records:
        ledger.add(record)
    compared = _compare(repeats, exact is True, ledger.findings)
    tenants = [
        account.totals(name, None if metered is None else metered.get(name, 0))
        for name, account in sorted(ledger.accounts.items())
    ]
    for wrong in filter(_is_wrong, tenants):
        ledger.findings.add(f"{TENANT_DIFFERS}: {wrong.tenant}")
    violations, tokens = ledger.findings.violations(), Tokens(**ledger.tokens)
    return Ledger(
        is_balanced=not violations,
        requests=sum(tenant.requests for tenant in tenants),
        accepted=sum(ledger.ends.values()),
        ends=ledger.ends,
        tokens=tokens,
        violations=violations,
        repeats=compared,
        tenants=tenants,
        sentences=_sentences(ledger.ends, violations, tokens, compared, tenants),
    )


def _compare(repeats: Sequence[Repeat], is_exact: bool, findings: _Findings) -> Repeats:
    comparable = [repeat for repeat in repeats if repeat.is_comparable]
    different = [repeat for repeat in comparable if not repeat.is_same]
    if is_exact:
        for repeat in different:
            findings.add(ANSWERS_DIFFER, repeat.second)
    return Repeats(
        compared=len(comparable),
        different=len(different),
        not_compared=len(repeats) - len(comparable),
        share=len(different) / len(comparable) if comparable else None,
        is_fatal=is_exact,
    )


def _is_wrong(tenant: TenantTotals) -> bool:
    if tenant.metered is None:
        return False
    return tenant.metered < tenant.least_metered or (
        tenant.most_metered is not None and tenant.metered > tenant.most_metered
    )


def _sentences(
    ends: dict[Outcome, int], violations: list[Violation], tokens: Tokens, repeats: Repeats, tenants: list[TenantTotals]
) -> list[str]:
    accepted, unfinished = sum(ends.values()), ends.get("unfinished", 0)
    if violations:
        verdict = (
            f"The ledger does not balance: {sum(violation.count for violation in violations):,} violations in "
            f"{accepted:,} accepted requests."
        )
    else:
        cut = f", but {unfinished:,} that were still open when the run ended" if unfinished else ""
        verdict = f"The ledger balances: each of {accepted:,} accepted requests ended in exactly one way{cut}."
    return [
        verdict,
        *map(_violation_sentence, violations),
        *_token_sentences(tokens),
        *_repeat_sentences(repeats),
        *_tenant_sentences(tenants),
    ]


def _violation_sentence(violation: Violation) -> str:
    which = ", ".join(
        str(example.index) if example.request_id is None else f"{example.index} ({example.request_id})"
        for example in violation.examples
    )
    more = ", ..." if violation.count > len(violation.examples) else ""
    return f"{violation.count:,} x {violation.kind}{f': request {which}{more}' if which else ''}."


def _token_sentences(tokens: Tokens) -> list[str]:
    unverified = tokens.by_usage + tokens.by_chunks
    sentences = []
    if tokens.verified:
        sentences.append(
            f"{tokens.verified:,} delivered tokens were counted by their ids; {tokens.matched:,} of them equal their "
            "request's usage exactly."
        )
    if tokens.unmetered:
        sentences.append(f"{tokens.unmetered:,} delivered tokens are of requests whose usage never came.")
    if unverified:
        sentences.append(
            f"{unverified:,} delivered tokens are unverified: {tokens.by_usage:,} by the server's usage, "
            f"{tokens.by_chunks:,} as one a chunk."
        )
    return sentences


def _repeat_sentences(repeats: Repeats) -> list[str]:
    if not repeats.compared:
        return (
            [f"None of {repeats.not_compared:,} repeated requests could be compared."] if repeats.not_compared else []
        )
    same = f"{repeats.compared - repeats.different:,} of {repeats.compared:,} repeated requests had the same answer"
    allowed = (
        ""
        if repeats.is_fatal or not repeats.different
        else f" ({repeats.share:.1%} differ; the server does not claim to be exact)"
    )
    left_out = f"; {repeats.not_compared:,} could not be compared" if repeats.not_compared else ""
    return [f"{same}{allowed}{left_out}."]


def _tenant_sentences(tenants: list[TenantTotals]) -> list[str]:
    sentences = []
    for tenant in tenants:
        if tenant.metered is not None:
            most = "or more" if tenant.most_metered is None else f"to {tenant.most_metered:,}"
            expected = (
                f"{tenant.least_metered:,}"
                if tenant.least_metered == tenant.most_metered
                else f"{tenant.least_metered:,} {most}"
            )
            verdict = "does not agree" if _is_wrong(tenant) else "agrees"
            sentences.append(
                f"The meter of tenant {tenant.tenant} shows {tenant.metered:,} completion tokens and {verdict} with "
                f"the {expected} expected."
            )
    return sentences
