"""The table of request fields of /v1/messages and /v1/responses: what is harmless and what is refused with a sentence.
What is honoured is declared by the structs in `wire.anthropic` and `wire.responses`.

`wire.fields` joins it with the table of OpenAI's two other endpoints and explains the verdicts. Sources: Anthropic's
API reference and the types of its Python client, beta features included; OpenAI's API reference and the types of its
Python client (3.52).
"""

from collections.abc import Mapping

from penstock.wire.anthropic import (
    BlockIn,
    CountTokensRequest,
    MessageIn,
    MessagesRequest,
    OutputConfig,
    OutputFormat,
    TextPart,
    ToolChoiceIn,
    ToolIn,
)
from penstock.wire.responses import (
    InputItem,
    InputPart,
    ReasoningConfig,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextForm,
)
from penstock.wire.rows import Refusal

_CONVERSATION = frozenset(
    {
        "cache_control",  # reuse is automatic
        "betas",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
_MCP = Refusal("Servers of tools are not called from here; send their tools as 'tools'", ([],))
_MANAGEMENT = Refusal(
    "The conversation is not changed on its way; send what the model is to read", ({}, [], {"edits": []})
)
_KEPT = "Nothing is kept between requests; send the whole conversation as 'input'"

DIALECT_HARMLESS: dict[type, frozenset[str]] = {
    MessagesRequest: _CONVERSATION | {"thinking"},  # how much is the model's matter, and it is not shown
    CountTokensRequest: _CONVERSATION | {"max_tokens", "output_config", "thinking"},
    MessageIn: frozenset({"id", "model", "type", "stop_reason", "stop_sequence", "usage", "container"}),
    BlockIn: frozenset({"cache_control", "citations", "caller", "thinking", "signature", "data"}),
    TextPart: frozenset({"cache_control", "citations"}),
    ToolIn: frozenset({"cache_control", "eager_input_streaming"}),
    ToolChoiceIn: frozenset(),
    OutputConfig: frozenset({"effort"}),
    OutputFormat: frozenset(),
    ResponsesRequest: frozenset(
        {
            "access_programs",
            "image",  # settings of images, which are refused
            "max_tool_calls",  # of tools that the server runs, of which there are none
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
        }
    ),
    InputItem: frozenset({"id", "status", "phase", "summary", "encrypted_content", "caller", "namespace"}),
    InputPart: frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"}),
    ResponseTool: frozenset(),
    ResponseToolChoice: frozenset(),
    TextConfig: frozenset({"verbosity"}),
    TextForm: frozenset(),
    ReasoningConfig: frozenset({"effort", "summary", "generate_summary"}),
}

DIALECT_REFUSED: dict[type, dict[str, Refusal]] = {
    MessagesRequest: {
        "container": Refusal("Containers for code are not supported"),
        "context_management": _MANAGEMENT,
        "mcp_servers": _MCP,
        "output_format": Refusal("The form of an answer is asked for by 'output_config.format'"),
    },
    CountTokensRequest: {"context_management": _MANAGEMENT, "mcp_servers": _MCP},
    MessageIn: {},
    BlockIn: {"source": Refusal("Images and documents are not supported; this model reads text only")},
    TextPart: {"source": Refusal("Images and documents are not supported; this model reads text only")},
    ToolIn: {
        "allowed_callers": Refusal("Tools are called by the model alone", (["direct"],)),
        "defer_loading": Refusal("Tools are told to the model at once", (False,)),
        "input_examples": Refusal("Examples of calls belong into the description", ([],)),
    },
    ToolChoiceIn: {},
    OutputConfig: {"task_budget": Refusal("Budgets of tasks are not supported; use 'max_tokens'")},
    OutputFormat: {},
    ResponsesRequest: {
        "background": Refusal("Answers in the background are not supported; nothing is kept here", (False,)),
        "context_management": Refusal("The conversation is not changed on its way", ([],)),
        "conversation": Refusal(_KEPT),
        "include": Refusal("What 'include' asks for is not there", ([], ["reasoning.encrypted_content"])),
        "moderation": Refusal("Moderation is not supported"),
        "previous_response_id": Refusal(_KEPT),
        "prompt": Refusal("Stored prompts are not supported; send its text as 'instructions'"),
        "top_logprobs": Refusal("Log probabilities are given by /v1/chat/completions", (0,)),
        "truncation": Refusal("A conversation that is too long is refused, not cut", ("disabled",)),
    },
    InputItem: {
        "async": Refusal("Calls whose results come later are not supported", (False,)),
        "async_": Refusal("Calls whose results come later are not supported", (False,)),  # as its client dumps items
    },
    InputPart: {
        "detail": Refusal("Images and files are not supported; this model reads text only"),
        "file_data": Refusal("Images and files are not supported; this model reads text only"),
        "file_id": Refusal("Images and files are not supported; this model reads text only"),
        "file_url": Refusal("Images and files are not supported; this model reads text only"),
        "image_url": Refusal("Images and files are not supported; this model reads text only"),
        "refusal": Refusal("Refusals are no parts of a conversation here; send them as text"),
    },
    ResponseTool: {
        "allowed_callers": Refusal("Tools are called by the model alone", (["direct"],)),
        "async": Refusal("Calls whose results come later are not supported", (False,)),
        "defer_loading": Refusal("Tools are told to the model at once", (False,)),
        "output_schema": Refusal("Schemas of results are not supported"),
    },
    ResponseToolChoice: {
        "mode": Refusal("A choice of some of the tools is not supported; send those alone as 'tools'"),
        "tools": Refusal("A choice of some of the tools is not supported; send those alone as 'tools'"),
    },
    TextConfig: {},
    TextForm: {},
    ReasoningConfig: {},
}

NESTED: Mapping[type, Mapping[str, type]] = {
    MessagesRequest: {
        "messages": MessageIn,
        "system": TextPart,
        "tools": ToolIn,
        "tool_choice": ToolChoiceIn,
        "output_config": OutputConfig,
    },
    CountTokensRequest: {
        "messages": MessageIn,
        "system": TextPart,
        "tools": ToolIn,
        "tool_choice": ToolChoiceIn,
    },
    MessageIn: {"content": BlockIn},
    BlockIn: {"content": TextPart},
    OutputConfig: {"format": OutputFormat},
    ResponsesRequest: {
        "input": InputItem,
        "tools": ResponseTool,
        "tool_choice": ResponseToolChoice,
        "text": TextConfig,
        "reasoning": ReasoningConfig,
    },
    InputItem: {"content": InputPart, "output": InputPart},
    TextConfig: {"format": TextForm},
}
"""Members that are objects or arrays of them, and the structs of these."""

DIALECT_PLACES: Mapping[type, str] = {
    MessagesRequest: "",
    CountTokensRequest: "",
    MessageIn: "messages.",
    BlockIn: "messages.content.",
    TextPart: "system.",
    ToolIn: "tools.",
    ToolChoiceIn: "tool_choice.",
    OutputConfig: "output_config.",
    OutputFormat: "output_config.format.",
    ResponsesRequest: "",
    InputItem: "input.",
    InputPart: "input.content.",
    ResponseTool: "tools.",
    ResponseToolChoice: "tool_choice.",
    TextConfig: "text.",
    TextForm: "text.format.",
    ReasoningConfig: "reasoning.",
}
"""What stands before a member's name where a request is spoken of as a whole."""
