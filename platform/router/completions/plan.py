"""The plan of one request: the sequences to run, where each may be answered, and the form of the answer.

Not the running (`completion`), and nothing is reserved or sent here. Invariant: whatever can be wrong with a decoded
request is found here, before anything is reserved for it and before the dispatcher knows of it.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from penstock.router.completions.admission import default_max_tokens
from penstock.router.completions.candidates import Candidates, LazyPrompts, Tokenize, find_candidates
from penstock.router.completions.completion import AnswerEvents, Choice, Prompt
from penstock.router.completions.constraints import Wanted, find_constraint, with_calls
from penstock.router.completions.dependencies import GatewayDependencies
from penstock.router.completions.formats import ResponseMeta, WholeFormat
from penstock.router.completions.parameters import sampling_for_choice, sampling_params, stop_strings
from penstock.router.completions.prompts import Reader, fit_prompt
from penstock.router.completions.text_assembly import Assembler, Shown, TextAssembler
from penstock.router.completions.tool_assembly import AnswerTools, ToolAssembler
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Generation, ProviderRequest, TokenizedPrompt
from penstock.router.transport.exchange import Exchange
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


async def plan(
    deps: GatewayDependencies,
    exchange: Exchange,
    tenant: Tenant,
    model: ServedModel,
    kind: EndpointKind[Request, AnswerFormat],
    request: Request,
) -> RequestPlan:
    """The plan for a request that `model` was found for.

    Raises Forbidden where the tenant's policy leaves no route, ContextTooLong, and InvalidRequest for whatever else
    cannot be done.
    """
    tools = read_tools(request) if isinstance(request, ChatRequest) else None

    # the places, and the tokens of the first model there
    candidates = find_candidates(model, tenant.tier_policy, request, deps.providers)
    sampling = sampling_params(request, deps.random.getrandbits(63), candidates.model.tokenizer.vocab_size)
    has_usage_chunk = _has_usage_chunk(request)

    def tokenize(tokenizer: Tokenizer, max_tokens: int | None) -> Awaitable[list[list[int]]]:
        return kind.tokenize(request, Reader(tokenizer, max_tokens, deps.threads, tenant.id, tools))

    candidates, tokenized = await _tokenize_for_first_model(tokenize, candidates, sampling)
    wanted, constrain = await _constrain(deps, tenant, request, tools, candidates.model.tokenizer)
    num_choices = _num_choices(request, len(tokenized))
    size = _AnswerSize(num_choices * len(tokenized), sampling.logprobs, deps.config.max_answer_tokens)
    max_tokens = default_max_tokens(
        tenant.limits,
        min(deps.config.default_max_tokens, size.max_tokens()),
        sum(map(len, tokenized)),
        size.num_sequences,
    )

    # the sequences
    deadline = deps.clock() + deps.config.request_timeout_s
    lazy_prompts = LazyPrompts(candidates.others, tokenize, sampling, max_tokens, constrain)
    has_offsets = kind.has_offsets and sampling.logprobs is not None
    stops = stop_strings(request)
    automaton = StopAutomaton(stops) if stops else NO_STOPS
    shown = Shown(request.skip_special_tokens is False, bool(request.include_stop_str_in_output), tools is not None)
    new_text = partial(TextAssembler, candidates.model.tokenizer, automaton, sampling.min_tokens, has_offsets, shown)
    new_assembler: Callable[[], Assembler] = new_text
    if tools is not None:
        answer_tools = AnswerTools(tools.names, tools.is_parallel, bool(request.stream))
        new_assembler = partial(_new_tool_assembler, deps, candidates.model.tokenizer, new_text, answer_tools)
    holds_request = kind.holds_request or candidates.has_provider or bool(candidates.others)
    scope = cache_scope(tenant, request.cache_salt)
    constraint = None if wanted is None else wanted.constraint
    sequences = _Sequences(
        exchange, tenant, request, candidates, deadline, lazy_prompts, new_assembler, scope, constraint
    )
    max_model_len = candidates.max_model_len()
    fitted = [fit_prompt(token_ids, sampling, max_model_len, max_tokens) for token_ids in tokenized]
    size.check(max(prompt.sampling.max_tokens for prompt in fitted))
    prompts = [sequences.choices(index, prompt, num_choices) for index, prompt in enumerate(fitted)]

    # the answer
    meta = ResponseMeta(
        id=kind.id_prefix + exchange.request_id,
        created=int(deps.now()),
        model=candidates.model.name,
        fingerprint=candidates.model.fingerprint,
        tokenizer=candidates.model.tokenizer,
        has_usage_chunk=has_usage_chunk,
        has_continuous_usage=has_usage_chunk and _wants_usage_throughout(request),
        has_token_ids=bool(request.return_token_ids),
        has_logprobs=sampling.logprobs is not None,
    )
    answer_format = kind.new_format(meta)
    num_answers = num_choices * len(prompts)

    def new_events(exchange: Exchange) -> AnswerEvents:
        return kind.new_events(exchange, answer_format, num_answers)

    return RequestPlan(prompts, answer_format, bool(request.stream), new_events, holds_request)


class _AnswerSize(NamedTuple):
    """The size of an answer: tokens of all its sequences, and where log probabilities are wanted an entry more for each
    token, and one for each of its likeliest alternatives. The gateway holds a whole answer, and any answer's memory and
    encoding grow with it."""

    num_sequences: int
    logprobs: int | None
    """Alternatives of each token; None: no log probabilities are wanted."""
    most: int

    @property
    def entries_per_token(self) -> int:
        return 1 if self.logprobs is None else 2 + self.logprobs

    def max_tokens(self) -> int:
        """Tokens that each sequence may have at most; at least 1."""
        return max(1, self.most // (self.num_sequences * self.entries_per_token))

    def check(self, max_tokens: int) -> None:
        """Raises InvalidRequest if sequences of so many tokens make more than the gateway allows."""
        if self.num_sequences * max_tokens * self.entries_per_token <= self.most:
            return
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
    candidates: Candidates
    deadline: float
    """Time of the monotonic clock, seconds."""
    lazy_prompts: LazyPrompts
    new_assembler: Callable[[], Assembler]
    scope: CacheScope
    constraint: Constraint | None

    def choices(self, prompt: int, tokenized: TokenizedPrompt, num_choices: int) -> Prompt:
        """The choices of prompt number `prompt`; they are numbered through all prompts."""
        first = prompt * num_choices
        return [
            Choice(first + number, self._generation(prompt, number, first + number, tokenized), self.new_assembler())
            for number in range(num_choices)
        ]

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
            lazy_prompts=self.lazy_prompts.for_sequence(prompt, number),
            skipped=candidates.skipped,
            provider_request=ProviderRequest(self.request, prompt) if candidates.has_provider else None,
            share=self.tenant.share,
            cache_scope=self.scope.label,
            priority=self.request.priority or 0,
            constraint=self.constraint,
        )


def _new_tool_assembler(
    deps: GatewayDependencies, tokenizer: Tokenizer, new_assembler: Callable[[], TextAssembler], tools: AnswerTools
) -> ToolAssembler:
    return ToolAssembler(new_assembler(), tools, tokenizer.tool_form, deps.random.getrandbits(63))


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


def _num_choices(request: ChatRequest | CompletionRequest, num_prompts: int) -> int:
    """Choices per prompt. Raises InvalidRequest when all prompts together have too many."""
    num_choices = request.n or 1
    if num_choices * num_prompts > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={num_choices} make more than {MAX_CHOICES} choices.", param="n"
        )
    return num_choices


def _has_usage_chunk(request: ChatRequest | CompletionRequest) -> bool:
    if request.stream_options is None:
        return False
    if not request.stream:
        raise InvalidRequest("'stream_options' may only be set when 'stream' is true.", param="stream_options")
    return bool(request.stream_options.include_usage)


def _wants_usage_throughout(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.continuous_usage_stats)
