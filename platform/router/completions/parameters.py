"""Sampling parameters of the engine from those of a request: defaults, seeds, and the bounds that depend on prompt and
model. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import SamplingParams
from penstock.wire.openai import ChatRequest, CompletionRequest, GenerationRequest

_SEED_BITS = 63
_MIN_TEMPERATURE = 1e-5
"""Smallest temperature that is not taken as 0: below it only the likeliest token is ever drawn, and dividing by it
would leave the range of float32."""


def sampling_params(request: ChatRequest | CompletionRequest, seed: int, vocab_size: int) -> SamplingParams:
    """Parameters of the first choice, with `max_tokens` as the request has it, or 0: see `bound_max_tokens` and
    `sampling_for_choice`. seed: drawn, for a request without one.

    Raises InvalidRequest for token ids that the model has not.
    """
    bias = tuple((request.logit_bias or {}).items())
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids([token_id for token_id, _ in bias], vocab_size, "logit_bias")
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=asked_max_tokens(request) or 0,
        seed=(seed if request.seed is None else request.seed) % 2**_SEED_BITS,
        temperature=_temperature(request.temperature),
        top_k=_top_k(request.top_k, vocab_size),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        logit_bias=bias,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        num_beams=num_beams(request),
        num_returned=(request.n or 1) if num_beams(request) else 1,
        length_penalty=_or(request.length_penalty if isinstance(request, CompletionRequest) else None, 1.0),
    )


def bound_max_tokens(
    sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int, default_max_tokens: int
) -> SamplingParams:
    """The parameters with a `max_tokens` that fits behind the prompt, or of 0, where that is the default. Raises
    ContextTooLong, or InvalidRequest when min_tokens exceeds it."""
    room = max_model_len - num_prompt_tokens
    wanted = sampling.max_tokens or min(default_max_tokens, max(1, room))
    if max(1, wanted) > room:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens. However, {num_prompt_tokens + wanted}"
            f" tokens were requested: {num_prompt_tokens} in the prompt and {wanted} for the answer. Shorten one of"
            " them."
        )
    if sampling.min_tokens > wanted:
        raise InvalidRequest(
            f"'min_tokens' ({sampling.min_tokens}) must not exceed the {wanted} tokens that the answer may have.",
            param="min_tokens",
        )
    return msgspec.structs.replace(sampling, max_tokens=wanted)


def sampling_for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of a prompt: 0 has the request's own seed, each other one a seed derived from
    it, and leaves log probabilities of the prompt to choice 0."""
    if index == 0:
        return sampling
    digest = hashlib.blake2b(
        sampling.seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8, person=b"penstock-choice"
    ).digest()
    seed = int.from_bytes(digest, "little") % 2**_SEED_BITS
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for a token id outside of [0, vocab_size)."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        offender = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"'{param}' holds {offender}; this model's token ids lie in 0..{vocab_size - 1}.", param=param
        )


def asked_max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    """Output bound of a request; None: it names none. Raises InvalidRequest for two that differ."""
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' contradict each other; set one.", param="max_completion_tokens"
        )
    return request.max_completion_tokens


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return None


def num_beams(request: ChatRequest | CompletionRequest) -> int:
    """Beams of a search; 0 where none is wanted."""
    if isinstance(request, ChatRequest) or not request.use_beam_search:
        return 0
    return request.best_of or request.n or 1


def wants_logprobs(request: ChatRequest | CompletionRequest) -> bool:
    """Whether log probabilities of the answer are shown."""
    return _logprobs(request) is not None


def _prompt_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """Likeliest tokens that are wanted at each place of the prompt, for `prompt_logprobs` and for an echo with log
    probabilities; None: no log probabilities of the prompt are wanted."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    wanted = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    return 0.0 if value < _MIN_TEMPERATURE else value


def _top_k(value: int | None, vocab_size: int) -> int:
    """0, which is all, for a k that leaves all tokens: a caller's may be too large for a message on the stream."""
    return value if value is not None and 0 < value < vocab_size else 0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
