"""Answers of /v1/responses: OpenAI's JSON, whole and as the events of a stream. Pure.

Invariant: the response at the end of a stream is what the same answer would be as a whole, and each event has the next
number.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from penstock.router.completions.formats import FinishedChoice, ResponseMeta
from penstock.router.completions.text_assembly import TextPiece
from penstock.router.dialects.blocks import Begin, Blocks, Part, Step
from penstock.router.dialects.responses import Repeated
from penstock.router.dialects.stream import named_event
from penstock.router.routing.request import CallDelta, Receipt
from penstock.wire.errors import error_body, http_error
from penstock.wire.openai import FinishReason, Usage
from penstock.wire.responses import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)

_TOO_MANY = 429
Ended = Literal["completed", "incomplete", "failed"]


class ResponsesFormat:
    """One answer. repeated: what it repeats of its request."""

    def __init__(self, meta: ResponseMeta, repeated: Repeated) -> None:
        self.meta = meta
        self._repeated = repeated
        self._blocks = Blocks()
        self._number = 0
        """Number of the next event."""
        self._items: list[OutputItem] = []
        """Items that have ended."""
        self._call: CallDelta | None = None
        """The call that is open; None: a text is, or nothing."""
        self._parts: list[str] = []
        """Parts of the item that is open."""
        self._is_open = False
        self._finish: FinishReason = "stop"

    def set_answering_model(self, receipt: Receipt) -> None:
        self.meta = self.meta.with_answering_model(receipt)

    def whole(self, choices: Iterable[FinishedChoice], usage: Usage) -> Iterator[bytes]:
        for choice in choices:
            last = len(choice.calls) - 1
            status = _status(choice.finish)
            items: list[OutputItem] = []
            if choice.text or not choice.calls:
                items.append(self._message(0, choice.text, status if last < 0 else "completed"))
            for number, call in enumerate(choice.calls):
                ended = status if number == last else "completed"
                items.append(self._function_call(len(items), call.id, call.name, call.arguments, ended))
            yield msgspec.json.encode(self._response(status, items, usage))

    def begin(self, usage: Usage) -> bytes:  # noqa: ARG002 (it is known at the end)
        return self._created()

    def _created(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: TextPiece) -> bytes:
        if piece.finish is not None:
            self._finish = piece.finish
        return b"".join(map(self._step, self._blocks.push(piece)))

    def text(self, text: str) -> bytes:
        return b"".join(map(self._step, self._blocks.text(text)))

    def end(self, usage: Usage) -> bytes:
        status = _status(self._finish)
        events = b"" if self._items or self._is_open else self._step(Begin(None))  # an empty answer is a message too
        events += self._end_item(status) if self._is_open else b""
        return events + self._event(f"response.{status}", response=self._response(status, self._items, usage))

    def failure(self, error: BaseException, request_id: str) -> bytes:  # noqa: ARG002 (the response has an id)
        events = b"" if self._number else self._created()  # no stream begins with its failure
        is_limit = http_error(error).status == _TOO_MANY
        failed = ResponseError(
            code="rate_limit_exceeded" if is_limit else "server_error", message=error_body(error)["error"]["message"]
        )
        return events + self._event("response.failed", response=self._response("failed", self._items, error=failed))

    def _step(self, step: Step) -> bytes:
        if isinstance(step, Begin):
            return self._begin_item(step.call)
        if isinstance(step, Part):
            self._parts.append(step.text)
            if self._call is not None:
                return self._item_event("response.function_call_arguments.delta", delta=step.text)
            return self._item_event("response.output_text.delta", content_index=0, delta=step.text, logprobs=[])
        return self._end_item("completed")

    def _begin_item(self, call: CallDelta | None) -> bytes:
        self._call, self._is_open, self._parts = call, True, []
        if call is not None:
            item = self._function_call(len(self._items), call.id or "", call.name or "", "", "in_progress")
            return self._event("response.output_item.added", output_index=len(self._items), item=item)
        message = OutputMessage(id=self._item_id("msg", len(self._items)), status="in_progress", content=[])
        added = self._event("response.output_item.added", output_index=len(self._items), item=message)
        return added + self._item_event("response.content_part.added", content_index=0, part=OutputText(text=""))

    def _end_item(self, status: ItemStatus) -> bytes:
        text, index = "".join(self._parts), len(self._items)
        item: OutputItem
        if self._call is not None:
            item = self._function_call(index, self._call.id or "", self._call.name or "", text, status)
            events = self._item_event("response.function_call_arguments.done", arguments=text, name=item.name)
        else:
            item = self._message(index, text, status)
            events = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            events += self._item_event("response.content_part.done", content_index=0, part=item.content[0])
        events += self._event("response.output_item.done", output_index=index, item=item)
        self._items.append(item)
        self._call, self._is_open, self._parts = None, False, []
        return events

    def _item_event(self, kind: str, **members: object) -> bytes:
        """An event of the item that is open."""
        index = len(self._items)
        item_id = self._item_id("msg" if self._call is None else "fc", index)
        return self._event(kind, item_id=item_id, output_index=index, **members)

    def _event(self, kind: str, **members: object) -> bytes:
        event = named_event(kind, {"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return event

    def _item_id(self, kind: Literal["msg", "fc"], index: int) -> str:
        return f"{kind}_{self.meta.id.partition('_')[2]}_{index}"

    def _message(self, index: int, text: str, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self._item_id("msg", index), status=status, content=[OutputText(text=text)])

    def _function_call(self, index: int, call_id: str, name: str, arguments: str, status: ItemStatus) -> OutputCall:
        item_id = self._item_id("fc", index)
        return OutputCall(id=item_id, call_id=call_id, name=name, arguments=arguments, status=status)

    def _response(
        self,
        status: Literal["in_progress"] | Ended,
        items: list[OutputItem],
        usage: Usage | None = None,
        error: ResponseError | None = None,
    ) -> Response:
        repeated = self._repeated
        return Response(
            id=self.meta.id,
            created_at=self.meta.created,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=repeated.instructions,
            max_output_tokens=repeated.max_output_tokens,
            metadata=repeated.metadata,
            model=self.meta.model,
            output=items,
            parallel_tool_calls=repeated.parallel_tool_calls,
            temperature=repeated.temperature,
            text=repeated.text,
            tool_choice=repeated.tool_choice,
            tools=repeated.tools,
            top_p=repeated.top_p,
            usage=None if usage is None else _usage(usage),
        )


def _status(finish: FinishReason) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0 if details is None else details.reasoning_tokens or 0
        ),
        total_tokens=usage.total_tokens,
    )
