"""The table of request fields: those of OpenAI's two endpoints with vLLM's and SGLang's extensions, and of /tokenize;
each is honoured, harmless, or refused with a sentence. Those of the other APIs come from `wire.dialect_fields`.

Not the fields' types: a field that is honoured is declared by its struct in `wire.openai`. One that is not declared is
never built, its JSON is skipped. Harmless is what changes nothing of the answer here: labels, hints, places in another
server. What would change it and is not implemented is refused, except with the values that have no effect. A name in no
row is unknown (`wire.unread`).

Sources: OpenAI's API reference and the types of its Python client (3.52); vLLM's main branch at 002032ee
(entrypoints/openai/chat_completion/protocol.py, entrypoints/openai/completion/protocol.py) and the `guided_` fields of
vLLM before 0.12; SGLang's main branch at 004c82e0 (srt/entrypoints/openai/protocol.py).
"""

from collections.abc import Iterable, Mapping

import msgspec

from penstock.wire.anthropic import MessagesRequest
from penstock.wire.dialect_fields import DIALECT_HARMLESS, DIALECT_PLACES, DIALECT_REFUSED
from penstock.wire.openai import (
    ChatMessageIn,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCallIn,
    FunctionDefinition,
    FunctionName,
    JsonSchemaFormat,
    NamedToolChoice,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolCallIn,
    ToolDefinition,
)
from penstock.wire.responses import ResponsesRequest
from penstock.wire.rows import Refusal, Row
from penstock.wire.tokenization import DetokenizeRequest, TokenizeRequest

_FUNCTIONS = "Functions in their form before tools are not supported; use 'tools'"
_CUSTOM = Refusal("Only functions are supported as tools")
_STRUCTURED = "The form of an answer is asked for by 'response_format' or 'structured_outputs'"
_WHITESPACE = "White space between the parts of JSON can't be chosen"
_KV_TRANSFER = "Moving KV between servers is the platform's own business"
_RAW_LOGITS = "Processors of logits are not accepted from requests"
_NO_TEMPLATE = Refusal("A chat template of the request's own is not accepted: it is a program")


def _each(names: Iterable[str], refusal: Refusal) -> dict[str, Refusal]:
    return dict.fromkeys(names, refusal)


# --- what both endpoints have

_HARMLESS = frozenset(
    {
        # OpenAI
        "user",
        # vLLM
        "guided_decoding_backend",  # the grammar is the same
        "length_penalty",  # of beams, which chats have not
        "media_io_kwargs",  # of images and sounds, which are refused
        "mm_processor_kwargs",
        "request_id",
        "return_mm_kwargs",  # vLLM ignores it here too, and the next one
        "return_token_offsets",
        "routed_experts_prompt_start",
        "session_id",
        "spaces_between_special_tokens",  # special tokens are never set apart here
        "stream_interval",
        # SGLang
        "custom_labels",
        "custom_params",  # of a custom_logit_processor
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "images_config",
        "ngram_corpus_id",
        "rid",
        "routed_dp_rank",
        "routed_experts_start_len",
    }
)
_REFUSED: dict[str, Refusal] = {
    # vLLM
    "logprob_token_ids": Refusal("Log probabilities of chosen tokens are not supported"),
    "prompt_embeds": Refusal("Embeddings as a prompt are not supported"),
    "repetition_detection": Refusal("Ending an answer that repeats itself is not supported"),
    "return_tokens_as_token_ids": Refusal("Tokens are shown as text; 'return_token_ids' adds their ids", (False,)),
    "thinking_token_budget": Refusal("A bound on thinking is not supported", (-1,)),
    "vllm_xargs": Refusal("Arguments for extensions of vLLM are not supported", ({},)),
    "watermarking": Refusal("Watermarks are not supported", (False,)),
    **_each(("kv_transfer_params", "ec_transfer_params"), Refusal(_KV_TRANSFER, ({},))),
    **_each(
        ("structural_tag", "json_schema", "regex", "ebnf"),  # the last three are SGLang's
        Refusal(_STRUCTURED),
    ),
    "guided_whitespace_pattern": Refusal(_WHITESPACE),
    # SGLang
    "extra_key": Refusal("Reuse is narrowed by 'cache_salt'"),
    "lora_path": Refusal("An adapter is named by 'model'"),
    "no_stop_trim": Refusal("Stop strings are kept by 'include_stop_str_in_output'", (False,)),
    "session_params": Refusal("Sessions are not supported; send the whole conversation", ({},)),
    "stop_regex": Refusal("Stop expressions are not supported; use 'stop'", ([],)),
    **_each(("logits_processors", "custom_logit_processor"), Refusal(_RAW_LOGITS, ([],))),  # the first is vLLM's
    **_each(("bootstrap_host", "bootstrap_port", "bootstrap_room"), Refusal(_KV_TRANSFER)),
    **_each(
        ("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
        Refusal("The model's inner state is not shown", (False,)),
    ),
}

# --- the rows that are not honoured, by struct

HARMLESS: dict[type, frozenset[str]] = {
    ChatRequest: _HARMLESS
    | {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",  # a hint, which models here do not read
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",  # a hint as well
        # SGLang
        "max_dynamic_patch",
        "min_dynamic_patch",
        "reasoning",  # its effort
        "use_audio_in_video",
    },
    CompletionRequest: _HARMLESS - {"length_penalty"},
    ChatMessageIn: frozenset({"name", "refusal", "annotations", "reasoning", "reasoning_content", "cache_control"}),
    ContentPart: frozenset({"cache_control"}),
    ToolCallIn: frozenset({"index"}),  # of the stream that the call came in
    FunctionCallIn: frozenset(),
    ToolDefinition: frozenset({"cache_control"}),
    FunctionDefinition: frozenset(),
    NamedToolChoice: frozenset(),
    FunctionName: frozenset(),
    Prediction: frozenset(),
    StreamOptions: frozenset({"include_obfuscation"}),
    ResponseFormat: frozenset(),
    JsonSchemaFormat: frozenset(),
    StructuredOutputs: frozenset({"disable_fallback", "_backend", "_backend_was_auto"}),
    TokenizeRequest: frozenset({"media_io_kwargs", "mm_processor_kwargs"}),
    DetokenizeRequest: frozenset(),
    **DIALECT_HARMLESS,
}

REFUSED: dict[type, dict[str, Refusal]] = {
    ChatRequest: {
        **_REFUSED,
        "use_beam_search": Refusal("Beam search is for /v1/completions", (False,)),
        "add_special_tokens": Refusal("The chat template alone adds special tokens", (False,)),
        "audio": Refusal("Audio output is not supported"),
        "function_call": Refusal(_FUNCTIONS, ("none", "auto")),
        "functions": Refusal(_FUNCTIONS, ([],)),
        "modalities": Refusal("Only the modality 'text' is supported", (["text"],)),
        "moderation": Refusal("Moderation is not supported"),
        "web_search_options": Refusal("Web search is not supported"),
        # vLLM
        "chat_template": _NO_TEMPLATE,
        "documents": Refusal("Documents are not supported; put them into a message", ([],)),
        "return_prompt_text": Refusal("The prompt's text is not shown", (False,)),
        # SGLang
        "input_ids": Refusal("Token ids as a prompt are taken by /v1/completions"),
        "task": Refusal("Tasks of a model are not supported"),
        **_each(
            ("return_prompt_token_ids", "return_meta_info"),
            Refusal("The prompt's token ids are not shown; /tokenize does", (False,)),
        ),
        # what other servers' clients mean by a message
        "system": Refusal("A system prompt is a message of role 'system'"),
    },
    CompletionRequest: {
        **_REFUSED,
        "suffix": Refusal("Inserting before a suffix is not supported", ("",)),
    },
    ChatMessageIn: {
        "audio": Refusal("Audio in messages is not supported"),
        "function_call": Refusal("Function calls in their form before tools are not supported; use 'tool_calls'"),
        "prefix": Refusal("A message that the answer goes on with is asked for by 'continue_final_message'", (False,)),
        "tools": Refusal("Tools are those of the request, not of a message", ([],)),
    },
    ContentPart: {},
    ToolCallIn: {"custom": _CUSTOM},
    FunctionCallIn: {},
    ToolDefinition: {"custom": _CUSTOM},
    FunctionDefinition: {},
    NamedToolChoice: {
        "allowed_tools": Refusal("A choice of some of the tools is not supported; send those alone as 'tools'"),
        "custom": _CUSTOM,
    },
    FunctionName: {},
    Prediction: {},
    StreamOptions: {},
    ResponseFormat: {},
    JsonSchemaFormat: {},
    StructuredOutputs: {
        "disable_additional_properties": Refusal("What else an object may hold is said by its schema", (False,)),
        "disable_any_whitespace": Refusal(_WHITESPACE, (False,)),
        "structural_tag": Refusal(_STRUCTURED),
        "whitespace_pattern": Refusal(_WHITESPACE),
    },
    TokenizeRequest: {"chat_template": _NO_TEMPLATE},
    DetokenizeRequest: {},
    **DIALECT_REFUSED,
}


def _rows(struct: type) -> dict[str, Row]:
    return {
        **{field.encode_name: Row("honoured") for field in msgspec.structs.fields(struct)},
        **{name: Row("harmless") for name in HARMLESS[struct]},
        **{name: Row("refused", refusal) for name, refusal in REFUSED[struct].items()},
    }


TABLE: Mapping[type, Mapping[str, Row]] = {struct: _rows(struct) for struct in REFUSED}
"""Rows of requests and of what is in them, by name."""

PLACES: Mapping[type, str] = {
    ChatRequest: "",
    CompletionRequest: "",
    ChatMessageIn: "messages.",
    ContentPart: "messages.content.",
    ToolCallIn: "messages.tool_calls.",
    FunctionCallIn: "messages.tool_calls.function.",
    ToolDefinition: "tools.",
    FunctionDefinition: "tools.function.",
    NamedToolChoice: "tool_choice.",
    FunctionName: "tool_choice.function.",
    Prediction: "prediction.",
    TokenizeRequest: "",
    DetokenizeRequest: "",
    StreamOptions: "stream_options.",
    ResponseFormat: "response_format.",
    JsonSchemaFormat: "response_format.json_schema.",
    StructuredOutputs: "structured_outputs.",
    **DIALECT_PLACES,
}
"""What stands before a member's name where a request is spoken of as a whole."""
_PATHS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}
_OTHERS = {
    ChatRequest: CompletionRequest,
    CompletionRequest: ChatRequest,
    MessagesRequest: ChatRequest,
    ResponsesRequest: ChatRequest,
}
"""Endpoints whose fields are not taken for unknown ones."""
_NOTHING: tuple[object, ...] = ([], {})
"""Values with which a field of the other endpoint asks for nothing."""

MEANT: Mapping[str, str] = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "num_predict": "max_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""Names of other servers for fields of the two endpoints that matter."""


def find_row(struct: type, name: str) -> Row | None:
    """The row of a member, or None if it is unknown. What only the other endpoint has, or of other APIs only chats
    have, is refused here, unless it is harmless there."""
    row = TABLE[struct].get(name)
    if row is not None or struct not in _OTHERS:
        return row
    other = TABLE[_OTHERS[struct]].get(name)
    if other is None or other.verdict == "harmless":
        return other
    accepted = _NOTHING if other.refusal is None else other.refusal.accepted
    return Row("refused", Refusal(f"'{name}' belongs to {_PATHS[_OTHERS[struct]]}", accepted))


def matters(struct: type) -> list[str]:
    """Names whose misspelling changes the answer."""
    return [name for name, row in TABLE[struct].items() if row.verdict != "harmless"]


def meant_by(struct: type) -> Mapping[str, str]:
    """Other words for fields of a request."""
    return MEANT if struct in _PATHS else {}
