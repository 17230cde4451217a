"""POST /v1/messages and /v1/responses: kinds of requests that the completions' endpoint serves.

Not the pipeline (`completions.endpoint`): keys, limits, plan, usage and receipts are those of a chat.
"""

from penstock.router.completions.endpoint import CompletionsEndpoint
from penstock.router.completions.formats import ResponseMeta
from penstock.router.completions.plan import EndpointKind
from penstock.router.completions.prompts import tokenize_chat
from penstock.router.dialects.message_format import MessageFormat, message_failure
from penstock.router.dialects.messages import chat_of_messages, chat_to_count
from penstock.router.dialects.response_format import ResponsesFormat
from penstock.router.dialects.responses import Repeated, chat_of_responses, repeated
from penstock.router.dialects.stream import NamedEventStream
from penstock.router.transport.exchange import ErrorForm, Exchange
from penstock.wire.anthropic import messages_error
from penstock.wire.bodies import decode_count_tokens, decode_messages, decode_responses
from penstock.wire.openai import ChatRequest
from penstock.wire.unread import IgnoredField

MESSAGES_PATH, COUNT_TOKENS_PATH = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES_PATH = "/v1/responses"
ANTHROPIC_ERRORS = ErrorForm(messages_error, message_failure)


def adopt_anthropic(exchange: Exchange) -> None:
    """Have the exchange speak as Anthropic's clients expect: their header for the key, their form of errors."""
    exchange.key_header = b"x-api-key"
    exchange.request_id_header = b"request-id"
    exchange.error_form = ANTHROPIC_ERRORS


def decode_count(body: bytes, ignored: list[IgnoredField]) -> ChatRequest:
    """The chat whose prompt is to be counted. Raises InvalidRequest."""
    return chat_to_count(decode_count_tokens(body, ignored, is_counted=True))


def _decode_messages(body: bytes, ignored: list[IgnoredField]) -> ChatRequest:
    return chat_of_messages(decode_messages(body, ignored, is_counted=True))


MESSAGES = EndpointKind(
    "msg_", _decode_messages, tokenize_chat, MessageFormat, has_offsets=False, new_events=NamedEventStream
)


class DialectEndpoints:
    """Handlers of both paths."""

    def __init__(self, completions: CompletionsEndpoint) -> None:
        self._completions = completions

    async def messages(self, exchange: Exchange) -> None:
        await self._completions.serve(exchange, MESSAGES)

    async def responses(self, exchange: Exchange) -> None:
        reading = _ResponsesReading()
        kind = EndpointKind(
            "resp_",
            reading.decode,
            tokenize_chat,
            reading.new_format,
            has_offsets=False,
            new_events=NamedEventStream,
            holds_request=True,
        )
        await self._completions.serve(exchange, kind)


class _ResponsesReading:
    """What one request's answer needs to know of it."""

    def __init__(self) -> None:
        self._repeated: Repeated | None = None

    def decode(self, body: bytes, ignored: list[IgnoredField]) -> ChatRequest:
        request = decode_responses(body, ignored, is_counted=True)
        self._repeated = repeated(request)
        return chat_of_responses(request)

    def new_format(self, meta: ResponseMeta) -> ResponsesFormat:
        assert self._repeated is not None
        return ResponsesFormat(meta, self._repeated)
