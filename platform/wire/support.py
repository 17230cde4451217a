"""What the types of `wire.openai` can't say of a request: a `best_of` below `n`, fields that exclude each other,
variables that a template can't have, messages that are not text, calls and results in messages of other roles.

Not fields that are refused as a whole: their table is `wire.fields`.
"""

from collections.abc import Mapping

from penstock.wire.errors import InvalidRequest
from penstock.wire.openai import MAX_BEAMS, MAX_SEARCH_STOP_TOKEN_IDS, ChatMessageIn, ChatRequest, CompletionRequest
from penstock.wire.template_kwargs import check_template_kwargs
from penstock.wire.tools import check_tool_message

_NEUTRAL_TO_SEARCH: Mapping[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
"""Fields that change scores, and their values that don't."""


def check(request: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidRequest for the first thing that is not supported."""
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest(
            "Log probabilities of the prompt do not come in a stream; leave out 'stream', or ask for 'echo' with"
            " 'logprobs'.",
            param="prompt_logprobs",
        )
    if request.max_tokens == 0 and not (request.echo or request.prompt_logprobs is not None):
        raise InvalidRequest(
            "Without output there is no answer; 'max_tokens' may be 0 only with 'echo' or 'prompt_logprobs'.",
            param="max_tokens",
        )
    if isinstance(request, ChatRequest):
        if request.chat_template_kwargs is not None:
            check_template_kwargs(request.chat_template_kwargs)
        for index, message in enumerate(request.messages):
            _check_message(message, f"messages[{index}]")
    else:
        if request.best_of is not None:
            _check_best_of(request, request.best_of)
        if request.use_beam_search:
            _check_search(request)


def _check_best_of(request: CompletionRequest, best_of: int) -> None:
    num_choices = request.n or 1
    if best_of < num_choices:
        raise InvalidRequest(f"'best_of' ({best_of}) must not be below 'n' ({num_choices}).", param="best_of")
    if request.stream and best_of > num_choices:
        raise InvalidRequest(
            "Which answers are the best is known when all have ended: 'best_of' above 'n' can't be streamed.",
            param="best_of",
        )


def _check_search(request: CompletionRequest) -> None:
    """Raises InvalidRequest for what does not go with a beam search, which goes by the model's own scores."""
    num_beams = request.best_of or request.n or 1
    if num_beams > MAX_BEAMS:
        raise InvalidRequest(f"A search has at most {MAX_BEAMS} beams, and not {num_beams}.", param="best_of")
    num_stops = len(request.stop_token_ids or ())
    if num_stops > MAX_SEARCH_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"A beam search takes at most {MAX_SEARCH_STOP_TOKEN_IDS} 'stop_token_ids', and not {num_stops}.",
            param="stop_token_ids",
        )
    if request.stream:
        raise InvalidRequest("What a beam search finds is known at its end, and can't be streamed.", param="stream")
    if request.max_tokens == 0:
        raise InvalidRequest("A beam search needs a 'max_tokens' of at least 1.", param="max_tokens")
    for name, neutral in _NEUTRAL_TO_SEARCH.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(
                f"A beam search goes by the model's own scores, which '{name}' would change; leave it out.", param=name
            )


def _check_message(message: ChatMessageIn, path: str) -> None:
    if message.role == "function":
        raise InvalidRequest(
            "Messages of role 'function' are not supported; send results of calls as role 'tool'.", param=f"{path}.role"
        )
    check_tool_message(message, path)
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            place = f"{path}.content[{index}]"
            if part.type != "text":
                raise InvalidRequest(
                    f"Content parts of type '{part.type[:40]}' are not supported; this model reads text only.",
                    param=f"{place}.type",
                )
            if part.text is None:
                raise InvalidRequest("A content part of type 'text' needs a 'text'.", param=f"{place}.text")
    elif message.content is None and message.role != "assistant":
        raise InvalidRequest(f"A message of role '{message.role}' needs a 'content'.", param=f"{path}.content")
