"""Dispatch: places each stream on a replica, and on another one when the first is lost or refuses.

Not HTTP, not the choice itself (policy), not the wait (queue). Before its first token a stream is simply submitted again; after it, with the
output so far behind the prompt, and since seed and noise belong to the position, the answer goes on as if nothing had happened. Invariant:
when `start` raises, or a stream is closed, nothing of it is left in the queue, on a replica or in a timer.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from prometheus_client import Counter

from penstock.base.metrics import Metrics
from penstock.prefix.index import PrefixIndex
from penstock.router.chains import Chain, ChainKind, Chains
from penstock.router.config import GatewayConfig, PoolSpec
from penstock.router.fleet import Fleet
from penstock.router.generation import Generation
from penstock.router.policy import Decision, Wait, choose
from penstock.router.remote import Remote
from penstock.router.stream import RoutedStream
from penstock.router.waiting import Lane, WaitQueue
from penstock.wire.errors import ContextTooLong, DeadlineExceeded, Overloaded, PenstockError
from penstock.wire.frames import Submit, pack_ids

FIRST_OUTPUT_TOKENS = 128.0
"""Expected length of an answer before any has finished."""
OUTPUT_TOKENS_RATE = 0.02
"""Weight of the latest answer in that expectation."""
EXPECT_GRACE_S = 2.0
"""A replica is taken to hold a prompt it was sent for twice its predicted TTFT and this long; by then its own event has come."""


class _Candidate(NamedTuple):
    remote: Remote
    chain: Chain
    cached_tokens: int


class RoutingDispatcher:
    """See `penstock.router.generation.Dispatcher`. `now` is Unix time; `clock` is monotonic; both in seconds."""

    def __init__(
        self,
        pools: Mapping[str, PoolSpec],
        fleet: Fleet,
        index: PrefixIndex,
        queue: WaitQueue,
        chains: Chains,
        config: GatewayConfig,
        metrics: Metrics,
        random: Random,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._fleet = fleet
        self._index = index
        self._queue = queue
        self._chains = chains
        self._max_buffered_deltas = config.max_buffered_deltas
        self._metrics = metrics
        self._random = random
        self._now = now
        self._clock = clock
        self._arrivals = itertools.count()
        self._output_tokens: dict[tuple[str, ...], float] = {}
        self._attempts: dict[tuple[str, str], Counter] = {}
        """By pool and kind: looking a label up costs more than counting."""

    async def start(self, generation: Generation) -> RoutedStream:
        """Raises Overloaded, DeadlineExceeded, or ContextTooLong where no replica's context holds the prompt."""
        stream = RoutedStream(generation, next(self._arrivals), self, self._max_buffered_deltas)
        try:
            await self.place(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    async def place(self, stream: RoutedStream) -> None:
        seconds_left = stream.generation.deadline - self._now()
        if seconds_left <= 0:
            raise DeadlineExceeded("the request's deadline has passed")
        began = self._clock()
        lane = Lane(tuple(sorted(stream.generation.pools)), frozenset(stream.refused_by))
        try:
            await self._queue.admit(lane, partial(self._try_place, stream), arrival=stream.arrival, deadline_in_s=seconds_left)
        finally:
            stream.receipt.queued_s += self._clock() - began

    def ended(self, stream: RoutedStream, error: PenstockError | None) -> None:
        if error is None:
            pools = stream.generation.pools
            mean = self._output_tokens.get(pools, FIRST_OUTPUT_TOKENS)
            self._output_tokens[pools] = mean + OUTPUT_TOKENS_RATE * (len(stream.output) - mean)

    def slow(self) -> None:
        self._metrics.slow_clients.inc()

    def _try_place(self, stream: RoutedStream) -> bool:
        """Choose and submit, now; False: no replica can take it."""
        if stream.is_closed:
            return True
        num_tokens = stream.generation.num_prompt_tokens + len(stream.output)
        remotes = self._fleet.remotes(stream.generation.pools)
        candidates = self._candidates(stream, num_tokens, [remote for remote in remotes if remote.member.replica_id not in stream.refused_by])
        decision = choose(num_tokens, self._expected_tokens(stream), [candidate.remote.view(candidate.cached_tokens) for candidate in candidates], self._random)
        if decision.replica_id is None:
            _raise_if_hopeless(decision, remotes, candidates, num_tokens)
            return False
        chosen = next(candidate for candidate in candidates if candidate.remote.member.replica_id == decision.replica_id)
        self._submit(stream, chosen, num_tokens)
        self._note(stream, chosen, decision)
        return True

    def _candidates(self, stream: RoutedStream, num_tokens: int, remotes: list[Remote]) -> list[_Candidate]:
        now = self._clock()
        held: dict[ChainKind, tuple[Chain, Mapping[str, int]]] = {}
        candidates = []
        for remote in remotes:
            kind = remote.chain_kind
            if kind not in held:
                chain = self._chain(stream, kind)
                held[kind] = chain, self._index.lookup(chain.keys, now)
            chain, blocks = held[kind]
            # the last token is always computed: its logits choose the next one
            num_blocks = min(blocks.get(remote.member.replica_id, 0), (num_tokens - 1) // kind.block_size)
            candidates.append(_Candidate(remote, chain, num_blocks * kind.block_size))
        return candidates

    def _chain(self, stream: RoutedStream, kind: ChainKind) -> Chain:
        """Of all tokens so far; the prompt's is made once."""
        generation = stream.generation
        chain = stream.chains.get(kind)
        if chain is None:
            chain = stream.chains[kind] = self._chains.chain(kind, generation.salt, generation.packed_ids)
        return self._chains.extended(chain, kind, _packed(stream)) if stream.output else chain

    def _submit(self, stream: RoutedStream, chosen: _Candidate, num_tokens: int) -> None:
        generation = stream.generation
        submit = Submit(
            sid=0,
            request_id=generation.request_id,
            token_ids=_packed(stream),
            block_keys=b"".join(chosen.chain.keys),
            chain_key=chosen.chain.parent,
            sampling=generation.sampling,
            num_output_tokens=len(stream.output),
            tenant=generation.tenant,
            deadline=generation.deadline,
        )
        sid = chosen.remote.submit(submit, num_tokens - chosen.cached_tokens, stream)
        stream.begin(chosen.remote, sid, generation.deadline - self._now())

    def _note(self, stream: RoutedStream, chosen: _Candidate, decision: Decision) -> None:
        """Receipt, metrics, and the foresight that the replica will hold this prompt."""
        member, receipt = chosen.remote.member, stream.receipt
        receipt.pool, receipt.replica = member.pool, member.replica_id
        receipt.tier = self._pools[member.pool].tier
        receipt.tier_reason = self._tier_reason(stream.generation.pools)
        receipt.reason = decision.reason.value
        receipt.predicted_ttft_s = decision.predicted_ttft_s
        receipt.predicted_cached_tokens = decision.cached_tokens
        receipt.scores = decision.scores
        kind = "first" if receipt.attempts == 1 else "resume" if stream.output else "retry"
        self._count_attempt(member.pool, kind)
        ttl_s = 2 * (decision.predicted_ttft_s or 0.0) + EXPECT_GRACE_S
        self._index.expect(member.replica_id, chosen.chain.keys, self._clock(), ttl_s)

    def _count_attempt(self, pool: str, kind: str) -> None:
        counter = self._attempts.get((pool, kind))
        if counter is None:
            counter = self._attempts[pool, kind] = self._metrics.route_attempts.labels(pool, kind)
        counter.inc()

    def _tier_reason(self, pools: tuple[str, ...]) -> str:
        return "only tier" if len({self._pools[pool].tier for pool in pools}) == 1 else "lowest predicted latency"

    def _expected_tokens(self, stream: RoutedStream) -> float:
        mean = self._output_tokens.get(stream.generation.pools, FIRST_OUTPUT_TOKENS)
        return max(1.0, min(mean, stream.generation.sampling.max_tokens) - len(stream.output))


def _packed(stream: RoutedStream) -> bytes:
    return stream.generation.packed_ids + pack_ids(stream.output) if stream.output else stream.generation.packed_ids


def _raise_if_hopeless(decision: Decision, remotes: list[Remote], candidates: list[_Candidate], num_tokens: int) -> None:
    """Waiting can't help when every replica's context is too short, or when each has refused and none of them is on its way out."""
    if decision.reason is Wait.CONTEXT:
        raise ContextTooLong(f"{num_tokens} tokens leave no room for an answer in the context of any replica of this model")
    if remotes and not candidates and not any(remote.load is not None and remote.load.is_draining for remote in remotes):
        raise Overloaded("every replica of this model refused the request", retry_after_s=1.0)
