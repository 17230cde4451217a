"""What the types of `wire.openai` can't say of a request: a `best_of` other than `n`, variables that a template can't
have, messages that are not text, calls and results in messages of other roles.

Not fields that are refused as a whole: their table is `wire.fields`.
"""

from penstock.wire.errors import InvalidRequest
from penstock.wire.fields import REFUSED
from penstock.wire.openai import ChatMessageIn, ChatRequest, CompletionRequest
from penstock.wire.template_kwargs import check_template_kwargs
from penstock.wire.tools import check_tool_message


def check(request: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidRequest for the first thing that is not supported."""
    if isinstance(request, ChatRequest):
        if request.chat_template_kwargs is not None:
            check_template_kwargs(request.chat_template_kwargs)
        for index, message in enumerate(request.messages):
            _check_message(message, f"messages[{index}]")
    elif request.best_of is not None and request.best_of != (request.n or 1):
        refusal = REFUSED[CompletionRequest]["best_of"]
        raise InvalidRequest(f"{refusal.sentence}; leave out 'best_of'.", param="best_of")


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
