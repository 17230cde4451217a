"""OpenAI's API as Penstock implements it: requests, responses and stream chunks as msgspec structs, from which
/openapi.json is made.

Not the semantics (the router's), not the reading of a body (`wire.bodies`). A request declares the fields that are
honoured; what becomes of others is in the table of `wire.fields`. Null means absent everywhere. Sources: OpenAI's API
reference and the types of its Python client; extensions are named as in vLLM.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_CHOICES = 128
"""Choices of one request: prompts times n."""
MAX_MESSAGES = 8192
"""Messages of one conversation, and content parts of one message."""
MAX_PROMPT_ITEMS = 2**18
"""Token ids of one prompt."""
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_BEAMS = 16
MAX_SEARCH_STOP_TOKEN_IDS = 8
"""Stop tokens of a beam search: for each, each beam needs as many more of its likeliest tokens as there are beams."""
MAX_BIASES = 1024
MAX_GUIDED_CHOICES = 1024
"""Texts of which an answer may have to be one."""
MAX_TOOLS = 128
"""Tools of one request, and tool calls of one message."""
MAX_TOOL_NAME_CHARS = 64

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
FinishReason = Literal["stop", "length", "tool_calls"]
Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
Json = msgspec.Raw
"""JSON as it stands in the body, of which nothing is built; null is `NULL`."""
NULL = Json(b"null")
_ABSENT: Any = None
"""The default of such a member."""


# --- requests


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """A last chunk with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk; only where `include_usage` is set too."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`response_format.json_schema`: what of it is not the schema is for providers."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: Json = _ABSENT
    """The JSON schema, as it stands in the body: the order of its properties is that of the answer."""
    strict: Annotated[bool, Meta(description="A schema is kept to in either case")] | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


GuidedText = Annotated[str, Meta(min_length=1)]
GuidedChoice = Annotated[list[GuidedText], Meta(min_length=1, max_length=MAX_GUIDED_CHOICES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must be, named as in vLLM; one of them."""

    json: Json = _ABSENT
    """A JSON schema, or a string that holds one."""
    json_object: bool | None = None
    regex: GuidedText | None = None
    choice: GuidedChoice | None = None
    grammar: GuidedText | None = None
    """A Lark grammar by llguidance's syntax."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share. A parent class because msgspec has no other way to put one struct's fields into
    another's JSON object."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None

    top_k: Annotated[int, Meta(ge=-1, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    return_token_ids: (
        Annotated[bool, Meta(description="Adds `token_ids` to every choice and to every chunk's choices")] | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = _ABSENT
    """The fields of `StructuredOutputs` by their older names."""
    guided_regex: GuidedText | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GuidedText | None = None
    skip_special_tokens: Annotated[bool, Meta(description="false: special tokens are part of the text")] | None = None
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="The stop string that ends the answer is part of it")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="Most tokens of the prompt, which is cut; -1: what the context leaves")]
        | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"], Meta(description="The side that is cut off")] | None = None
    priority: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="Among the tenant's own requests; lower goes first")]
        | None
    ) = None
    cache_salt: (
        Annotated[str, Meta(min_length=1, max_length=1024, description="Reuse among requests with the same salt only")]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[
            list[Annotated[int, Meta(ge=0)]],
            Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="The tokens that may be chosen"),
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Meta(max_length=MAX_BAD_WORDS, description="Texts whose tokens do not come in the answer"),
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description="Likeliest tokens at each place of the prompt")]
        | None
    ) = None


class FunctionCallIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    arguments: Annotated[str, Meta(description="JSON of an object")] = "{}"


class ToolCallIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an earlier answer, as the caller sends it back."""

    id: str
    type: Annotated[str, Meta(description="Only `function` is supported")] = "function"
    function: FunctionCallIn | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="Only `text` is supported")]
    text: str | None = None


class ChatMessageIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation. An assistant's message may be sent back as it was received."""

    role: Role
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Annotated[list[ToolCallIn], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: Json = _ABSENT
    """JSON Schema of the arguments, an object; absent: the function has none."""
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="Only `function` is supported")]
    function: FunctionDefinition | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A demand that the answer calls this function."""

    type: Annotated[str, Meta(description="Only `function` is supported")]
    function: FunctionName | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer may be, for the most part."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessageIn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call")] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Annotated[bool, Meta(description="The answer begins with the message that it goes on with")] | None = None
    prediction: Prediction | None = None
    add_generation_prompt: Annotated[bool, Meta(description="false: no assistant's turn is begun")] | None = None
    continue_final_message: Annotated[bool, Meta(description="The answer goes on with the last message")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables of the chat template")] | None = None
    include_reasoning: Annotated[bool, Meta(description="false: the answer has no `reasoning_content`")] | None = None
    separate_reasoning: Annotated[bool, Meta(description="false: thinking is content, with its markers")] | None = None
    stream_reasoning: Annotated[bool, Meta(description="false: thinking is one chunk, when it is complete")] | None = (
        None
    )


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[
            list[str | int | Annotated[list[int], Meta(max_length=MAX_PROMPT_ITEMS)]],
            Meta(max_length=MAX_PROMPT_ITEMS),
        ]
    )
    """One kind only: a string, strings, token ids, or arrays of token ids."""
    max_tokens: (
        Annotated[int, Meta(ge=0, description="0: only with `echo` or `prompt_logprobs`, nothing is generated")] | None
    ) = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Annotated[bool, Meta(description="The answer begins with the prompt")] | None = None
    best_of: (
        Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Answers of which the likeliest `n` are returned")] | None
    ) = None
    use_beam_search: (
        Annotated[bool, Meta(description="The likeliest answers, by a search of `best_of` or `n` beams")] | None
    ) = None
    length_penalty: (
        Annotated[float, Meta(ge=-10, le=10, description="Power of their length by which beams are scored")] | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="false: texts as they are")] | None = None


# --- responses


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens whose KV was found in a replica's cache."""


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    reasoning_tokens: int | None = None
    """Completion tokens of the thinking, its markers included; absent where the model does not think."""
    accepted_prediction_tokens: int | None = None
    """Tokens of the request's prediction that stand in the answer."""
    rejected_prediction_tokens: int | None = None
    """Tokens of the prediction that do not; they are not charged."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Absent where the model does not think and nothing was predicted."""


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class PromptToken(msgspec.Struct, frozen=True, gc=False):
    """A token at a place of the prompt, in vLLM's format."""

    logprob: float
    rank: int
    """1 for the likeliest token."""
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""An entry for each token of the prompt, null for the first: by token id, itself and the likeliest ones."""


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessageOut(msgspec.Struct, frozen=True):
    content: str | None
    """Text beside the calls; null where an answer has calls and no text."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """What a model thought before its answer; absent where it did not."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a call: the first one has its id, type and name, each a piece of the arguments, which may be empty."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The next part of what the model thinks, before any content."""


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """The legacy format. A token that is no whole character is written `bytes:\\xe2\\x96`. The first token of an echoed
    prompt has no log probability: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, and a chunk of a stream alike."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of prompt and answer together."""
    exact: bool
    """The same greedy or seeded request always gets the same tokens, whatever runs beside it; false: but for
    near-ties."""
    root: str | UnsetType = UNSET
    """Model that an adapter was made for, the same as `parent`; only for adapters."""
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str
