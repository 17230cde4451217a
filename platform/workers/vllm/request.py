"""A sequence as a request to vLLM, and vLLM's log probabilities in our form. Pure.

Two things differ from our engine: vLLM's noise comes from a generator that starts with the seed, not from the
position, so seeded answers are others than ours and a resumed sequence goes on with other noise; and penalties of a
resumed sequence do not see the output from before.
"""

from typing import Any, NamedTuple

from penstock.wire.frames import Finish, TokenLogprobs, needed_abilities, pack_token_ids
from penstock.workers.engine.sequence import Sequence
from penstock.workers.vllm.bridge import Add, EndReason, Logprob

FINISHES: dict[EndReason, Finish] = {
    "stop": Finish.STOP,
    "length": Finish.LENGTH,
    "error": Finish.ERROR,
    "refused": Finish.INVALID,
}


class VllmAdapter(NamedTuple):
    """An adapter that vLLM has read: satisfies `penstock.workers.engine.sequence.Resident`."""

    digest: str
    number: int
    """Number of the adapter in vLLM's process."""


def find_refusal(seq: Sequence) -> str | None:
    """Why a sequence can't be sent to vLLM. Returns None if it can; vLLM itself may still refuse it, and reports
    that."""
    if seq.adapter is not None and not isinstance(seq.lora, VllmAdapter):
        return f"The pool of this model serves no adapters (engine.adapters.slots); {seq.adapter!r} needs another pool."
    needed = needed_abilities(seq.sampling)
    if needed:
        return f"The pool of this model runs vLLM, which does not do this here: {', '.join(sorted(needed))}."
    return None


def make_add(seq: Sequence, rid: int, eos_token_ids: frozenset[int]) -> Add:
    salt = f"tenant:{seq.tenant}:{seq.cache_scope}" if seq.cache_scope else f"tenant:{seq.tenant}"
    adapter = seq.lora.number if isinstance(seq.lora, VllmAdapter) else None
    return Add(rid, pack_token_ids(seq.token_ids), make_sampling(seq, eos_token_ids), salt, adapter)


def make_sampling(seq: Sequence, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams; some are left out where they equal its default. Our bounds count from the end
    of the prompt, vLLM's from the end of the tokens it is given."""
    ours, done = seq.sampling, seq.num_output_tokens
    stops = set(ours.stop_token_ids) | (set() if ours.ignore_eos else eos_token_ids)
    found: dict[str, Any] = {
        "max_tokens": max(1, ours.max_tokens - done),
        "temperature": ours.temperature,
        "ignore_eos": True,  # vLLM gets no tokenizer, and so knows none: they are among the stops
        "stop_token_ids": sorted(stops),
        "min_tokens": max(0, ours.min_tokens - done),
    }
    if ours.temperature:
        found["seed"] = (ours.seed + done) % 2**63  # a resumed sequence must not draw the noise of its beginning again
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logprobs"):
        found[name] = getattr(ours, name)
    if ours.logit_bias:
        found["logit_bias"] = dict(ours.logit_bias)
    return found


def make_logprobs(found: list[Logprob] | None, wanted: int | None) -> list[TokenLogprobs] | None:
    """Log probabilities in our form, with the `wanted` likeliest tokens; None where none are wanted. vLLM lists the
    chosen token among the likeliest even where it is none of them."""
    if found is None or wanted is None:
        return None
    return [TokenLogprobs(item.logprob, tuple(item.top[:wanted])) for item in found]
