"""The plan of one request: the sequences to run, where each may be answered, and the form of the answer.

Not the running (`completion`), and nothing is reserved or sent here. Invariant: whatever can be wrong with a decoded
request is found here, before anything is reserved for it and before the dispatcher knows of it.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from penstock.router.completions.admission import can_ever_fit, default_max_tokens
from penstock.router.completions.candidates import Candidates, LazyPrompts, Tokenize, find_candidates
from penstock.router.completions.completion import AnswerEvents, Choice, Prompt
from penstock.router.completions.constraints import Wanted, find_constraint, with_calls
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.echo import Echo, EchoWish, text_of, wish_of
from penstock.router.completions.escalation import AWAY, LIMIT, Escalation, Outcome, Trial, find_escalation
from penstock.router.completions.formats import ResponseMeta, WholeFormat
from penstock.router.completions.parameters import (
    asked_max_tokens,
    num_beams,
    sampling_for_choice,
    sampling_params,
    stop_strings,
    wants_logprobs,
)
from penstock.router.completions.prediction import read_prediction
from penstock.router.completions.prediction_count import PredictedTokens, PredictionCount
from penstock.router.completions.prompts import Reader, fit_prompt
from penstock.router.completions.reasoning_assembly import ReasoningAssembler, read_reasoning
from penstock.router.completions.text_assembly import Assembler, Shown, TextAssembler
from penstock.router.completions.token_masks import mask_tokens
from penstock.router.completions.tool_assembly import AnswerTools, ToolAssembler
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Generation, ProviderRequest, TokenizedPrompt
from penstock.router.routing.tiers import TierRule, may_leave
from penstock.router.transport.exchange import Exchange
from penstock.router.transport.stay import read_rule
from penstock.tenancy.tenants import CacheScope, Tenant, cache_scope
from penstock.text.stops import NO_STOPS, StopAutomaton
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import Constraint, SamplingParams
from penstock.wire.openai import MAX_CHOICES, ChatRequest, CompletionRequest
from penstock.wire.tools import RequestedTools, read_tools
from penstock.wire.unread import IgnoredField

Request = TypeVar("Request", ChatRequest, CompletionRequest)
AnswerFormat = TypeVar("AnswerFormat", bound=WholeFormat)


class EndpointKind(NamedTuple, Generic[Request, AnswerFormat]):
    """What the endpoints that generate differ in."""

    id_prefix: str
    decode: Callable[[bytes, list[IgnoredField]], Request]
    tokenize: Callable[[Request, Reader], Awaitable[list[list[int]]]]
    new_format: Callable[[ResponseMeta], AnswerFormat]
    has_offsets: bool
    """Whether its logprobs name the place in the text where each token begins."""
    new_events: Callable[[Exchange, AnswerFormat, int], AnswerEvents]
    """The emitter of a streamed answer with so many choices."""
    holds_request: bool = False
    """Whether the format has parts of the request to repeat."""


class RequestPlan(NamedTuple):
    """What one request runs, and how it is answered."""

    prompts: Sequence[Prompt]
    """Choices of each prompt, in the order of the request."""
    answer_format: WholeFormat
    """JSON of the answer; its `meta` is what the response says of the request."""
    is_stream: bool
    """Whether the answer leaves as server-sent events."""
    new_events: Callable[[Exchange], AnswerEvents]
    """The emitter, where the answer leaves as events."""
    holds_request: bool
    """Whether the decoded request is held as long as the answer runs: another model or a provider may need it."""
    num_generated: int = 1
    """Choices of each prompt."""
    num_returned: int = 1
    """Choices of each prompt that are in the answer: the best."""


async def plan(
    deps: GatewayDependencies,
    exchange: Exchange,
    tenant: Tenant,
    model: ServedModel,
    kind: EndpointKind[Request, AnswerFormat],
    request: Request,
) -> RequestPlan:
    """The plan for a request that `model` was found for.

    Raises Forbidden where the tenant's policy, or the request's own word, leaves no route, ContextTooLong, and
    InvalidRequest for whatever else cannot be done.
    """
    tools = read_tools(request) if isinstance(request, ChatRequest) else None

    # the places, and the tokens of the first model there
    rule = read_rule(exchange, tenant)
    candidates = find_candidates(model, rule, request, deps.providers)
    tokenizer = candidates.model.tokenizer
    sampling = sampling_params(request, deps.random.getrandbits(63), tokenizer.vocab_size)
    sampling = await mask_tokens(sampling, request, tokenizer, deps.threads, tenant.id)
    num_returned, num_choices = request.n or 1, _num_generated(request)
    if num_choices > num_returned and sampling.logprobs is None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)  # by which the best are chosen
    has_usage_chunk = _has_usage_chunk(request)

    scope = cache_scope(tenant, request.cache_salt)
    seen = deps.seen.scope(tenant.id, scope.salt)

    def tokenize(tokenizer: Tokenizer, max_tokens: int | None) -> Awaitable[list[list[int]]]:
        return kind.tokenize(request, Reader(tokenizer, max_tokens, deps.threads, tenant.id, tools, seen))

    candidates, tokenized = await _tokenize_for_first_model(tokenize, candidates, sampling)
    tokenizer = candidates.model.tokenizer
    wanted, constrain = await _constrain(deps, tenant, request, tools, tokenizer)
    prediction = await read_prediction(request, Reader(tokenizer, None, deps.threads, tenant.id))
    _check_num_choices(max(num_choices, sampling.num_beams), len(tokenized))
    wish, num_prompt_tokens = wish_of(request), sum(map(len, tokenized))
    echoed_entries = 0 if wish is None else num_choices * wish.num_entries(num_prompt_tokens)
    num_sequences = num_choices * len(tokenized)
    size = _AnswerSize(num_sequences, sampling.logprobs, deps.config.max_answer_tokens, echoed_entries)
    default = min(deps.config.default_max_tokens, size.max_tokens())
    ttft_target_s = deps.targets.find(model.label, tenant.share.service_class).ttft_s
    patience_s = deps.config.ttft_target_s if ttft_target_s is None else ttft_target_s
    escalation = find_escalation(model.escalation, candidates, patience_s, may_leave=may_leave(rule, AWAY))
    if sampling.num_beams or asked_max_tokens(request) == 0:
        escalation = None  # a search has no first tokens, and a prompt alone none at all
    tariff = deps.admission.find_tariff(model.label, model.adapter_name)
    max_tokens = (
        0
        if asked_max_tokens(request) == 0
        else default_max_tokens(
            tenant.limits, default, num_prompt_tokens, max(num_choices, sampling.num_beams) * len(tokenized), tariff
        )
    )

    # the sequences
    deadline = deps.clock() + deps.config.request_timeout_s
    lazy_prompts = LazyPrompts(candidates.others, tokenize, sampling, max_tokens, constrain)
    has_offsets = kind.has_offsets and wants_logprobs(request)
    thinks = wanted is None and _thinks(request, candidates)
    new_assembler = _make_assemblers(
        deps, request, tokenizer, tools, sampling.min_tokens, has_offsets=has_offsets, thinks=thinks
    )
    holds_request = kind.holds_request or candidates.has_provider or bool(candidates.others)
    sequences = _Sequences(
        exchange=exchange,
        tenant=tenant,
        request=request,
        rule=rule,
        candidates=candidates,
        deadline=deadline,
        lazy_prompts=lazy_prompts,
        new_assembler=new_assembler,
        scope=scope,
        constraint=None if wanted is None else wanted.constraint,
        wish=wish,
        prediction=prediction,
        ttft_target_s=ttft_target_s,
        escalation=escalation,
    )
    max_model_len = candidates.max_model_len()
    fitted = [fit_prompt(token_ids, sampling, max_model_len, max_tokens) for token_ids in tokenized]
    size.check(max(prompt.sampling.max_tokens for prompt in fitted))
    prompts = [sequences.choices(index, prompt, num_choices) for index, prompt in enumerate(fitted)]
    if escalation is not None and escalation.obstacle is None and not can_ever_fit(tenant.limits, prompts, tariff):
        once = escalation._replace(obstacle=Outcome.NO_CLOUD, reason=LIMIT)
        sequences = sequences._replace(escalation=once)
        prompts = [sequences.choices(index, prompt, num_choices) for index, prompt in enumerate(fitted)]

    # the answer
    meta = ResponseMeta(
        id=kind.id_prefix + exchange.request_id,
        created=int(deps.now()),
        model=candidates.model.name,
        fingerprint=candidates.model.fingerprint,
        tokenizer=tokenizer,
        has_usage_chunk=has_usage_chunk,
        has_continuous_usage=has_usage_chunk and _wants_usage_throughout(request),
        has_token_ids=bool(request.return_token_ids),
        has_logprobs=wants_logprobs(request),
    )
    answer_format = kind.new_format(meta)
    num_answers = num_returned * len(prompts)

    def new_events(exchange: Exchange) -> AnswerEvents:
        return kind.new_events(exchange, answer_format, num_answers)

    return RequestPlan(
        prompts, answer_format, bool(request.stream), new_events, holds_request, num_choices, num_returned
    )


class _AnswerSize(NamedTuple):
    """The size of an answer: tokens of all its sequences, and where log probabilities are wanted an entry more for each
    token, and one for each of its likeliest alternatives; and the same of what is shown of prompts. The gateway holds a
    whole answer, and any answer's memory and encoding grow with it."""

    num_sequences: int
    logprobs: int | None
    """Alternatives of each token; None: no log probabilities are wanted."""
    most: int
    num_echoed: int = 0
    """Entries of what is shown of the prompts."""

    @property
    def entries_per_token(self) -> int:
        return 1 if self.logprobs is None else 2 + self.logprobs

    def max_tokens(self) -> int:
        """Tokens that each sequence may have at most; at least 1."""
        return max(1, (self.most - self.num_echoed) // (self.num_sequences * self.entries_per_token))

    def check(self, max_tokens: int) -> None:
        """Raises InvalidRequest if sequences of so many tokens make more than the gateway allows."""
        if self.num_sequences * max_tokens * self.entries_per_token + self.num_echoed <= self.most:
            return
        if self.num_echoed >= self.most:
            raise InvalidRequest(
                f"What the answer would show of its prompts has {self.num_echoed} tokens and alternatives; this gateway"
                f" takes at most {self.most}. Shorten the prompts, or ask for less about each token.",
            )
        logprobs = "" if self.logprobs is None else f", each with log probabilities of {self.logprobs} alternatives"
        raise InvalidRequest(
            f"The answer may have {self.num_sequences} times {max_tokens} tokens{logprobs}. This gateway takes at most"
            f" {self.max_tokens()} tokens in each of so many such sequences; lower 'max_tokens', the number of choices,"
            " or what is asked about each token.",
            param="max_tokens",
        )


class _Sequences(NamedTuple):
    """What the sequences of one request have in common."""

    exchange: Exchange
    tenant: Tenant
    request: ChatRequest | CompletionRequest
    rule: TierRule
    candidates: Candidates
    deadline: float
    """Time of the monotonic clock, seconds."""
    lazy_prompts: LazyPrompts
    new_assembler: Callable[[bytes, int], Assembler]
    """Makes an assembler for the answer to a packed prompt, behind so many characters."""
    scope: CacheScope
    constraint: Constraint | None
    wish: EchoWish | None
    """What answers show of their prompts; None: nothing."""
    prediction: bytes
    """Packed ids of what the answer may be."""
    escalation: Escalation | None = None
    """The places that an edge pool may send the request to; None: it sends none."""
    ttft_target_s: float | None = None
    """Target of the time to first token, seconds; None: the gateway's."""

    def choices(self, prompt: int, tokenized: TokenizedPrompt, num_choices: int) -> Prompt:
        """The choices of prompt number `prompt`; they are numbered through all prompts."""
        first = prompt * num_choices
        echo = self._echo(prompt, tokenized)
        first_offset = 0 if echo is None else len(echo.text)
        predicted = PredictedTokens(self.prediction) if self.prediction else None
        trials = [self._trial(number) for number in range(num_choices)]
        new_probe = partial(self.new_assembler, tokenized.packed_token_ids, 0)
        return [
            Choice(
                first + number,
                self._generation(prompt, number, first + number, tokenized),
                self.new_assembler(tokenized.packed_token_ids, first_offset),
                echo=echo,
                predicted=None if predicted is None else PredictionCount(predicted),
                trial=trial,
                new_probe=None if trial is None else new_probe,
            )
            for number, trial in enumerate(trials)
        ]

    def _trial(self, number: int) -> Trial | None:
        """What a prompt's first choice is tried with; the others go where it went."""
        return None if self.escalation is None or number else Trial(self.escalation)

    def _echo(self, prompt: int, tokenized: TokenizedPrompt) -> Echo | None:
        if self.wish is None:
            return None
        tokenizer, text = self.candidates.model.tokenizer, text_of(self.request, prompt)
        return Echo(self.wish, tokenizer, tokenized.packed_token_ids, text)

    def _generation(self, prompt: int, number: int, index: int, tokenized: TokenizedPrompt) -> Generation:
        """The generation of one choice. number: the choice's number within its prompt; index: within the request."""
        candidates, request_id = self.candidates, self.exchange.request_id
        return Generation(
            request_id=request_id if index == 0 else f"{request_id}-{index}",
            pools=candidates.pools,
            packed_token_ids=tokenized.packed_token_ids,
            num_prompt_tokens=tokenized.num_prompt_tokens,
            sampling=sampling_for_choice(tokenized.sampling, number),
            tenant=self.tenant.id,
            salt=self.scope.salt,
            deadline=self.deadline,
            adapter=candidates.model.adapter,
            traced=self.exchange.traced,
            routes=candidates.routes,
            tier_rule=self.rule,
            lazy_prompts=self.lazy_prompts.for_sequence(prompt, number),
            skipped=candidates.skipped,
            provider_request=ProviderRequest(self.request, prompt) if candidates.has_provider else None,
            share=self.tenant.share,
            ttft_target_s=self.ttft_target_s,
            cache_scope=self.scope.label,
            priority=self.request.priority or 0,
            constraint=self.constraint,
            prediction=self.prediction,
            num_judged_tokens=self._num_judged_tokens(number),
        )

    def _num_judged_tokens(self, number: int) -> int:
        escalation = self.escalation
        return 0 if escalation is None or escalation.obstacle is not None or number else escalation.rule.tokens


def _make_assemblers(
    deps: GatewayDependencies,
    request: ChatRequest | CompletionRequest,
    tokenizer: Tokenizer,
    tools: RequestedTools | None,
    min_tokens: int,
    *,
    has_offsets: bool,
    thinks: bool,
) -> Callable[[bytes, int], Assembler]:
    """A function that makes an assembler for each sequence: the answer to a packed prompt, behind so many characters.
    thinks: whether a model may think before it answers."""
    stops = stop_strings(request)
    automaton = StopAutomaton(stops) if stops else NO_STOPS
    shown = Shown(
        request.skip_special_tokens is False, bool(request.include_stop_str_in_output), tools is not None, thinks
    )
    new_text = partial(TextAssembler, tokenizer, automaton, min_tokens, has_offsets, shown)
    reasoning = read_reasoning(request) if thinks and isinstance(request, ChatRequest) else None
    answer_tools = None if tools is None else AnswerTools(tools.names, tools.is_parallel, bool(request.stream))

    def new_assembler(packed_prompt: bytes, first_offset: int) -> Assembler:
        text = new_text(first_offset)
        assembler = text if reasoning is None else ReasoningAssembler(text, reasoning, tokenizer, packed_prompt)
        if answer_tools is None:
            return assembler
        return ToolAssembler(assembler, answer_tools, tokenizer.tool_form, deps.random.getrandbits(63))

    return new_assembler


def _thinks(request: ChatRequest | CompletionRequest, candidates: Candidates) -> bool:
    """Whether a model that may answer thinks before it does."""
    return isinstance(request, ChatRequest) and any(
        model.tokenizer.reasoning_form is not None for model in (candidates.model, *candidates.others)
    )


async def _constrain(
    deps: GatewayDependencies,
    tenant: Tenant,
    request: ChatRequest | CompletionRequest,
    tools: RequestedTools | None,
    tokenizer: Tokenizer,
) -> tuple[Wanted | None, Callable[[Tokenizer], Constraint | None] | None]:
    """What the answer must be where it is by the first model, and for other models a function of their tokenizers, if
    that differs. Raises InvalidRequest for what can't be enforced."""
    wanted = find_constraint(request)
    if wanted is not None and num_beams(request):
        raise InvalidRequest(
            f"A beam search goes by the model's own scores, which '{wanted.param}' would mask; leave one of them out.",
            param=wanted.param,
        )
    if wanted is not None:
        await deps.constraints.check(wanted, tenant.id)
    if tools is None:
        return wanted, None
    joined = with_calls(wanted, tools, tokenizer)
    if joined is None:
        return None, None
    await deps.constraints.check(joined, tenant.id)

    def constrain(other: Tokenizer) -> Constraint | None:
        found = with_calls(wanted, tools, other)
        return None if found is None else found.constraint

    return joined, constrain


async def _tokenize_for_first_model(
    tokenize: Tokenize, candidates: Candidates, sampling: SamplingParams
) -> tuple[Candidates, list[list[int]]]:
    """The prompts in the tokens of the first model whose context holds them, and the candidates from that model on;
    where no context does, of the last model."""
    while True:
        rest = candidates.beyond_first_model()
        try:
            token_ids = await tokenize(candidates.model.tokenizer, candidates.max_prompt_tokens())
        except ContextTooLong:
            if rest is None:
                raise
        else:
            is_fit = max(map(len, token_ids)) + (sampling.max_tokens or 1) <= candidates.max_model_len()
            if is_fit or rest is None:
                return candidates, token_ids
            if not rest.has_pool:
                return rest, token_ids
        candidates = rest


def _num_generated(request: ChatRequest | CompletionRequest) -> int:
    """Choices of each prompt that are generated."""
    if isinstance(request, ChatRequest) or request.use_beam_search:
        return request.n or 1
    return request.best_of or request.n or 1


def _check_num_choices(num_choices: int, num_prompts: int) -> None:
    """Raises InvalidRequest when all prompts together have too many."""
    if num_choices * num_prompts > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_choices} choices each make more than {MAX_CHOICES} choices.", param="n"
        )


def _has_usage_chunk(request: ChatRequest | CompletionRequest) -> bool:
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidRequest("'stream_options' may only be set when 'stream' is true.", param="stream_options")
    return bool(request.stream_options.include_usage)


def _wants_usage_throughout(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.continuous_usage_stats)
