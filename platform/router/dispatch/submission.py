"""The submission of a sequence to the replica or provider that was chosen for it.

Not the choice, and nothing that waits. The request's state is read and not written: what came of it is returned.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from penstock.prefix.index import PrefixIndex
from penstock.router.dispatch.mailbox import Mailbox
from penstock.router.dispatch.route_states import Candidate, RouteState
from penstock.router.dispatch.state import Carrier
from penstock.router.providers.provider import Provider
from penstock.router.routing.tiers import may_leave
from penstock.wire.frames import SamplingParams, Submit

EXPECT_GRACE_S = 2.0
"""A replica is taken to hold a prompt it was sent for twice its predicted TTFT and this long; by then its own event has
come."""


class Submission(NamedTuple):
    """The carrier that has the sequence now, and its number there."""

    carrier: Carrier
    sid: int
    is_text: bool
    """The carrier answers in text."""
    num_cached_tokens: int = 0
    """Tokens of prompt and output so far that should be in the carrier's cache."""


class Submitter:
    """Submits sequences. clock: monotonic seconds. now: Unix time, seconds. is_fair: whether replicas are to divide the
    rows of their steps among tenants."""

    def __init__(
        self,
        index: PrefixIndex,
        providers: Mapping[str, Provider],
        clock: Callable[[], float],
        now: Callable[[], float],
        *,
        is_fair: bool,
    ) -> None:
        self._is_fair = is_fair
        self._index = index
        self._providers = providers
        self._clock = clock
        self._now = now

    def submit(self, mailbox: Mailbox, chosen: RouteState) -> Submission:
        """Submit prompt and output so far."""
        assert may_leave(mailbox.state.generation.tier_rule, chosen.route.tier), chosen.route
        if chosen.route.provider is not None:
            return _submit_to_provider(mailbox, self._providers[chosen.route.provider])
        submission = self._submit_to_replica(mailbox, chosen.chosen, _sampling(mailbox, chosen))
        self._expect_blocks(chosen)
        return submission

    def _submit_to_replica(self, mailbox: Mailbox, chosen: Candidate, sampling: SamplingParams) -> Submission:
        state = mailbox.state
        generation, tokenized = state.generation, state.tokenized
        seconds_left = generation.deadline - self._clock()
        submit = Submit(
            sid=0,
            request_id=generation.request_id,
            packed_token_ids=tokenized.packed_token_ids + state.packed_output,
            block_keys=b"".join(chosen.chain.keys),
            chain_key=chosen.chain.parent,
            sampling=sampling,
            num_output_tokens=len(state.output),
            adapter=generation.adapter,
            tenant=generation.tenant,
            deadline=self._now() + seconds_left,
            traceparent=None if generation.traced.trace is None else generation.traced.traceparent,
            seconds_left=seconds_left,
            service_class=generation.share.service_class,
            weight=generation.share.rate if self._is_fair else 0.0,
            cache_scope=generation.cache_scope,
            constraint=tokenized.constraint or generation.constraint,
            prediction=b"" if state.model_index else generation.prediction,
        )
        uncached_tokens = state.num_tokens(tokenized) - chosen.cached_tokens
        sid = chosen.client.submit(submit, uncached_tokens, mailbox)
        return Submission(chosen.client, sid, is_text=False, num_cached_tokens=chosen.cached_tokens)

    def _expect_blocks(self, chosen: RouteState) -> None:
        """Count the prompt as cached at the replica before its own block events come."""
        assert chosen.decision is not None
        member, keys = chosen.chosen.client.member, chosen.chosen.chain.keys
        lifetime_s = 2 * (chosen.decision.predicted_ttft_s or 0.0) + EXPECT_GRACE_S
        self._index.expect(member.replica_id, keys, self._clock(), lifetime_s)


def _sampling(mailbox: Mailbox, chosen: RouteState) -> SamplingParams:
    """The parameters of the attempt; where the gateway itself judges its first tokens, with their log probabilities."""
    state = mailbox.state
    sampling = state.sampling(state.tokenized)
    is_judged = chosen.route.tier == "edge" and len(state.output) < state.generation.num_judged_tokens
    if not is_judged or sampling.logprobs is not None:
        return sampling
    return msgspec.structs.replace(sampling, logprobs=0, logprobs_tokens=state.generation.num_judged_tokens)


def _submit_to_provider(mailbox: Mailbox, provider: Provider) -> Submission:
    state = mailbox.state
    request, tokenized = state.generation.provider_request, state.tokenized
    assert request is not None
    sid = provider.begin(
        request,
        tokenized.sampling.max_tokens,
        tokenized.sampling.seed,
        tokenized.num_prompt_tokens,
        mailbox,
        state.generation.traced.headers,
        None if state.reservation is None else state.reservation.reservation,
    )
    return Submission(provider, sid, is_text=True)
