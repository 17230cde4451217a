"""/openapi.json: OpenAPI 3.1, with the schemas that msgspec derives from the structs of `wire.openai`, which also read
the requests."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec

from penstock.wire.accounts import RequestReceipt, TenantUsage
from penstock.wire.adapters import AdapterDeleted, AdapterImport, AdapterList, AdapterOut
from penstock.wire.anthropic import (
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from penstock.wire.batches import BatchCreate, BatchList, BatchOut, FileDeleted, FileList, FileOut, LineResult
from penstock.wire.errors import HTTP_ERRORS
from penstock.wire.fields import HARMLESS, REFUSED
from penstock.wire.openai import (
    MAX_CHOICES,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    CompletionRequest,
    ErrorResponse,
    Health,
    Model,
    ModelList,
    TextCompletion,
    Version,
)
from penstock.wire.responses import Response, ResponseEvent, ResponsesRequest
from penstock.wire.status import ModelStatus, Status
from penstock.wire.tokenization import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    ChatRequest,
    CompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    Model,
    ModelList,
    TokenizeRequest,
    Tokenized,
    DetokenizeRequest,
    Detokenized,
    MessagesRequest,
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesError,
    TokenCount,
    ResponsesRequest,
    Response,
    ResponseEvent,
    RequestReceipt,
    TenantUsage,
    AdapterImport,
    AdapterOut,
    AdapterList,
    AdapterDeleted,
    FileOut,
    FileList,
    FileDeleted,
    BatchCreate,
    BatchOut,
    BatchList,
    LineResult,
    ErrorResponse,
    Health,
    ModelStatus,
    Status,
    Version,
)

_RECEIPT_HEADERS = {
    "x-penstock-tier": ("string", "Tier that answers"),
    "x-penstock-tier-reason": ("string", "Why that tier"),
    "x-penstock-stay": ("string", "Tier on which the request asked to stay; absent where it did not"),
    "x-penstock-replica": ("string", "Replica that answers"),
    "x-penstock-cached-tokens": ("integer", "Prompt tokens whose KV was found in the replica's cache"),
    "x-penstock-predicted-ttft-ms": ("number", "Time to first token that routing predicted"),
}
_REQUEST_ID = {"x-penstock-request-id": ("string", "Unique id of this request")}
_STAY = {
    "name": "x-penstock-stay",
    "in": "header",
    "schema": {"enum": ["edge"]},
    "description": "Has this request answered on the edge or not at all, whatever the tenant's policy allows",
}
_IGNORED = {"x-penstock-ignored-fields": ("string", "Fields of the request that were accepted and change nothing")}

_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
"""Schema of a legacy prompt, which msgspec's types cannot express: an array holds one kind of items."""

_SECURED = (401, 404, 503)
_KEPT = (401, 404, 429, 503)
_LISTED = (400, *_KEPT)
_UPLOAD = (400, 401, 404, 408, 413, 429, 503)
_GENERATION = tuple(sorted({row.status for row in HTTP_ERRORS.values()} - {405}))


def document() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    schemas["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    for struct in REFUSED:
        _describe_support(schemas[struct.__name__], struct)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version("penstock"),
            "description": "OpenAI-compatible API of a Penstock gateway.",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key: sk-penstock-..."},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key"},
            },
        },
        "security": [{"key": []}],
    }


def _paths() -> dict[str, Any]:
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": "Model name; may contain slashes",
    }
    request = {
        "name": "request_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": "As x-penstock-request-id gives it",
    }
    return {
        "/v1/chat/completions": {
            "post": _generation(
                "createChatCompletion", "Answer a conversation", ChatRequest, ChatCompletion, ChatCompletionChunk
            )
        },
        "/v1/completions": {
            "post": _generation(
                "createCompletion", "Continue a text", CompletionRequest, TextCompletion, TextCompletion
            )
        },
        "/v1/messages": {
            "post": _as_anthropic(
                _named_events(
                    "createMessage",
                    "Answer a conversation, as Anthropic's API does",
                    MessagesRequest,
                    Message,
                    MessageEvent,
                )
            )
        },
        "/v1/messages/count_tokens": {
            "post": _as_anthropic(
                _token_page(
                    "countTokens",
                    "Tokens of a conversation, as Anthropic's API counts them",
                    CountTokensRequest,
                    TokenCount,
                )
            )
        },
        "/v1/responses": {
            "post": _named_events(
                "createResponse", "Answer a conversation; nothing is kept", ResponsesRequest, Response, ResponseEvent
            )
        },
        "/v1/embeddings": {"post": _embeddings()},
        "/tokenize": {
            "post": _token_page("tokenize", "Token ids of a text or a conversation", TokenizeRequest, Tokenized)
        },
        "/detokenize": {"post": _token_page("detokenize", "Text of token ids", DetokenizeRequest, Detokenized)},
        "/v1/models": {"get": _page("listModels", "The models served", ModelList, _SECURED)},
        "/v1/models/{model}": {"get": _page("retrieveModel", "One model", Model, _SECURED) | {"parameters": [name]}},
        "/v1/receipts/{request_id}": {
            "get": _page("retrieveReceipt", "Why a request was answered where it was", RequestReceipt, _SECURED)
            | {"parameters": [request]}
        },
        "/v1/adapters": {
            "get": _page("listAdapters", "The tenant's LoRA adapters", AdapterList, _SECURED),
            "post": _adapter_creation(),
        },
        "/v1/adapters/{name}": {
            "get": _page("retrieveAdapter", "One of the tenant's adapters", AdapterOut, _SECURED),
            "delete": _page(
                "deleteAdapter", "End an adapter for new requests; those under way keep it", AdapterDeleted, _SECURED
            ),
            "parameters": [
                {
                    "name": "name",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string"},
                    "description": "The adapter's name",
                }
            ],
        },
        **_file_paths(),
        **_batch_paths(),
        "/v1/usage": {"get": _usage_page()},
        "/v1/status": {"get": _page("retrieveStatus", "What runs, of what the tenant may use", Status, (401, 503))},
        "/healthz": {"get": _open_page("health", "Whether the gateway's process answers", Health)},
        "/readyz": {"get": _readiness("readiness")},
        "/health": {"get": _readiness("healthOfServer")},
        "/ping": {"get": _readiness("ping")},
        "/version": {"get": _open_page("version", "Penstock's version", Version)},
        "/metrics": {"get": _open_text("metrics", "Metrics in Prometheus' text format")},
        "/openapi.json": {"get": _open_object("openapi", "This document")},
        "/": {"get": _open_text("home", "A page to read: what runs, and a playground", "text/html")},
        "/docs": {"get": _open_text("docs", "A page to read: this document", "text/html")},
    }


def _generation(operation: str, summary: str, request: type, answer: type, chunk: type) -> dict[str, Any]:
    events = {
        "type": "string",
        "description": f"Events `data: JSON`, each a {chunk.__name__}; then `data: [DONE]`",
        "contentSchema": _reference(chunk),
    }
    stream = {"text/event-stream": {"schema": events}}
    responses: dict[str, Any] = {
        "200": {
            "description": "The answer; a stream of chunks when `stream` is true",
            "headers": _headers(_REQUEST_ID | _RECEIPT_HEADERS | _IGNORED),
            "content": _json(answer) | stream,
        }
    }
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [_STAY],
        "requestBody": {"required": True, "content": _json(request)},
        "responses": responses | _errors(_GENERATION),
    }


def _named_events(operation: str, summary: str, request: type, answer: type, event: type) -> dict[str, Any]:
    """A page whose stream has events with names, and no `[DONE]`."""
    page = _generation(operation, summary, request, answer, event)
    schema = page["responses"]["200"]["content"]["text/event-stream"]["schema"]
    schema["description"] = f"Events `event: NAME`, `data: JSON`, each a {event.__name__} of that type"
    page["responses"]["200"]["description"] = "The answer; a stream of events when `stream` is true"
    return page


def _as_anthropic(page: dict[str, Any]) -> dict[str, Any]:
    """The page with errors in Anthropic's form, and their header for the key beside Authorization."""
    for status, response in page["responses"].items():
        if status != "200":
            response["content"] = _json(MessagesError)
    return page | {"security": [{"key": []}, {"x-api-key": []}]}


def _embeddings() -> dict[str, Any]:
    responses = _errors((401, 404, 429, 503))
    summary = "No pool serves an embedding model: always 404"
    return {"operationId": "createEmbedding", "summary": summary, "responses": responses}


def _page(operation: str, summary: str, answer: type, errors: Sequence[int] = ()) -> dict[str, Any]:
    responses = {"200": {"description": summary, "headers": _headers(_REQUEST_ID), "content": _json(answer)}}
    return {"operationId": operation, "summary": summary, "responses": responses | _errors(errors)}


def _usage_page() -> dict[str, Any]:
    summary = "What the tenant has used in the last 31 days, what it cost and is charged"
    page = _page("retrieveUsage", summary, TenantUsage, (400, 401, 503))
    page["responses"]["200"]["content"]["text/csv"] = {"schema": {"type": "string"}}
    form = {"type": "string", "enum": ["json", "csv"], "default": "json"}
    return page | {"parameters": [{"name": "format", "in": "query", "required": False, "schema": form}]}


def _token_page(operation: str, summary: str, request: type, answer: type) -> dict[str, Any]:
    page = _page(operation, summary, answer, (400, 401, 403, 404, 408, 413, 429, 503))
    page["responses"]["200"]["headers"] |= _headers(_IGNORED)
    return page | {"requestBody": {"required": True, "content": _json(request)}}


def _adapter_creation() -> dict[str, Any]:
    fields = {name: {"type": "string"} for name in ("name", "base_model")}
    files = {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "string", "contentMediaType": "application/octet-stream"},
    }
    described = files | {"description": "adapter_config.json and adapter_model.safetensors, known by their file names"}
    form = {"type": "object", "required": ["name", "file"], "properties": fields | {"file": described}}
    page = _page(
        "createAdapter",
        "Bring a LoRA adapter in PEFT's format, or replace one",
        AdapterOut,
        (400, 401, 403, 404, 408, 413, 429, 502, 503),
    )
    page["responses"] = {
        "201" if status == "200" else status: response for status, response in page["responses"].items()
    }
    return page | {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}} | _json(AdapterImport)}
    }


def _file_paths() -> dict[str, Any]:
    expiry = {"type": "string", "pattern": "^[0-9]+$", "description": "3600..2592000"}
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": expiry,
        },
    }
    creation = _page("createFile", "Bring a text of lines for a batch", FileOut, _UPLOAD)
    content = _page("retrieveFileContent", "A file's text", FileOut, _KEPT)
    content["responses"]["200"]["content"] = {"application/octet-stream": {"schema": {"type": "string"}}}
    parameters = [_path_id("file_id", "The file's id")]
    return {
        "/v1/files": {
            "get": _page("listFiles", "The tenant's files", FileList, _LISTED)
            | {"parameters": _query(10_000, order=["asc", "desc"], purpose=["batch", "batch_output"])},
            "post": creation
            | {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}},
        },
        "/v1/files/{file_id}": {
            "get": _page("retrieveFile", "One of the tenant's files", FileOut, _KEPT),
            "delete": _page("deleteFile", "Remove a file", FileDeleted, (400, *_KEPT)),
            "parameters": parameters,
        },
        "/v1/files/{file_id}/content": {"get": content, "parameters": parameters},
    }


def _batch_paths() -> dict[str, Any]:
    creation = _page("createBatch", "Have the lines of a file run, with what capacity others leave", BatchOut, _UPLOAD)
    parameters = [_path_id("batch_id", "The batch's id")]
    return {
        "/v1/batches": {
            "get": _page("listBatches", "The tenant's batches, newest first", BatchList, _LISTED)
            | {"parameters": _query(100)},
            "post": creation
            | {"parameters": [_STAY], "requestBody": {"required": True, "content": _json(BatchCreate)}},
        },
        "/v1/batches/{batch_id}": {
            "get": _page("retrieveBatch", "One of the tenant's batches", BatchOut, _KEPT),
            "parameters": parameters,
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _page("cancelBatch", "Have no further line run", BatchOut, (400, *_KEPT)),
            "parameters": parameters,
        },
    }


def _path_id(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": description}


def _query(max_limit: int, **choices: Sequence[str]) -> list[dict[str, Any]]:
    """Parameters of a list."""
    schemas: dict[str, dict[str, Any]] = {
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": max_limit},
        **{name: {"enum": list(values)} for name, values in choices.items()},
    }
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


def _open_page(operation: str, summary: str, answer: type) -> dict[str, Any]:
    return _page(operation, summary, answer) | {"security": []}


def _readiness(operation: str) -> dict[str, Any]:
    page = _open_page(operation, "Whether at least one replica is connected", Health)
    page["responses"]["503"] = {
        "description": "No replica is connected",
        "headers": _headers(_REQUEST_ID),
        "content": _json(Health),
    }
    return page


def _open_text(operation: str, summary: str, content_type: str = "text/plain") -> dict[str, Any]:
    response = {"description": summary, "content": {content_type: {"schema": {"type": "string"}}}}
    return {"operationId": operation, "summary": summary, "responses": {"200": response}, "security": []}


def _open_object(operation: str, summary: str) -> dict[str, Any]:
    response = {"description": summary, "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"operationId": operation, "summary": summary, "responses": {"200": response}, "security": []}


def _errors(statuses: Sequence[int]) -> dict[str, Any]:
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "headers": _headers(_REQUEST_ID),
            "content": _json(ErrorResponse),
        }
        for status in statuses
    }


def _headers(headers: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": kind}} for name, (kind, text) in headers.items()}


def _json(struct: type) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(struct)}}


def _reference(struct: type) -> dict[str, Any]:
    return {"$ref": _REF.format(name=struct.__name__)}


def _describe_support(schema: dict[str, Any], struct: type) -> None:
    """Add the fields that are harmless or refused, which the struct does not declare. Others are taken too."""
    schema["additionalProperties"] = True
    properties = schema["properties"]
    for name in sorted(HARMLESS[struct]):
        properties[name] = {"description": "Accepted and ignored"}
    for name, refusal in sorted(REFUSED[struct].items()):
        sentence = f"{refusal.sentence}: a request that sets it is refused"
        properties[name] = properties.get(name, {}) | {"description": sentence, "deprecated": True}
